// One operation at a time. Sends and writes with immediate are answered in kind, so a sample is a round trip;
// the others end with their own completion.
#include "floor.h"

#include <stdlib.h>
#include <string.h>

static void one(struct conn *conn, uint64_t number, uint64_t end)
{
	const struct spec *spec = conn->spec;
	bool signaled = (number + 1) % spec->signal == 0 || number + 1 == end;
	post_ops(conn, 1, end);
	while ((op_consumes_receive(spec->op) && conn->received <= number) || (signaled && conn->completed <= number))
		progress(conn);
}

static bool verified(const struct conn *conn, uint64_t end)
{
	switch (conn->spec->op) {
	case OP_SEND: // the last answer, in the last receive slot used, is what the server sends: its slots are all 0x5a
		return conn->local[(conn->spec->depth + (end - 1) % receive_depth(conn->spec)) * conn->stride] == 0x5a;
	case OP_WRITE_IMM:
		return conn->target[0] == 0x5a;
	case OP_READ:
		return conn->local[(end - 1) % conn->spec->depth * conn->stride] == 0xa5;
	case OP_CAS:
	case OP_FAA: { // the last one found the word as the one before had left it
		uint64_t found;
		memcpy(&found, conn->local + (end - 1) % conn->spec->depth * conn->stride, sizeof(found));
		return found == end - 1;
	}
	case OP_WRITE:
		return conn->completed == end;
	}
	return false;
}

void latency_client(struct conn *conn)
{
	const struct spec *spec = conn->spec;
	uint64_t end = spec->warmup + spec->iters;
	uint64_t *samples = spec->samples ? calloc(spec->iters, sizeof(*samples)) : NULL;
	uint64_t number = 0;
	for (; number < spec->warmup; number++)
		one(conn, number, end);
	count_from_here(conn);
	uint64_t start = now_ns(), last = start;
	for (; number < end; number++) {
		one(conn, number, end);
		mark(conn, number + 1 - spec->warmup);
		if (!samples)
			continue;
		uint64_t now = now_ns();
		samples[number - spec->warmup] = now - last;
		last = now;
	}
	uint64_t total = now_ns() - start;
	report_ops(conn, (struct result){total, samples, verified(conn, end)});
	free(samples);
}

void latency_server(struct conn *conn)
{
	const struct spec *spec = conn->spec;
	if (!op_consumes_receive(spec->op)) {
		disconnect_second(conn); // nothing to do but to be there
		return;
	}
	uint64_t end = spec->warmup + spec->iters;
	for (uint64_t number = 0; number < end; number++) {
		while (conn->received <= number)
			progress(conn);
		post_ops(conn, 1, end);
	}
	while (conn->completed < end)
		progress(conn);
	disconnect_second(conn);
}
