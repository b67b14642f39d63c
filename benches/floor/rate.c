// Many operations in flight. Messages that need a receive are sent against credits, so the receiver is never found empty.
#include "floor.h"

#include <stdlib.h>

// The sender may be this many messages ahead of the receiver; each half of them that was received gives a credit.
static uint64_t window(const struct conn *conn)
{
	return receive_depth(conn->spec);
}

static uint64_t allowed(const struct conn *conn)
{
	if (!op_consumes_receive(conn->spec->op))
		return UINT64_MAX;
	return window(conn) + conn->received * (window(conn) / 2);
}

static bool room_for(const struct conn *conn, uint32_t count)
{
	return conn->posted + count - conn->completed <= conn->spec->depth && conn->posted + count <= allowed(conn);
}

static void run(struct conn *conn, uint64_t until, uint64_t end)
{
	while (conn->posted < until) {
		uint64_t left = until - conn->posted;
		uint32_t count = left < conn->spec->batch ? left : conn->spec->batch;
		if (room_for(conn, count)) {
			post_ops(conn, count, end);
			if (conn->marked)
				mark(conn, conn->posted - conn->spec->warmup);
		} else {
			progress(conn);
		}
	}
}

void rate_client(struct conn *conn)
{
	const struct spec *spec = conn->spec;
	uint64_t end = spec->warmup + spec->iters;
	run(conn, spec->warmup, end);
	count_from_here(conn);
	uint64_t start = now_ns();
	run(conn, end, end);
	while (conn->completed < end)
		progress(conn);
	report_ops(conn, (struct result){now_ns() - start, NULL, conn->completed == end});
}

void rate_server(struct conn *conn)
{
	const struct spec *spec = conn->spec;
	uint64_t end = spec->warmup + spec->iters, half = window(conn) / 2;
	while (op_consumes_receive(spec->op) && conn->received < end) {
		progress(conn);
		while ((conn->posted + 1) * half <= conn->received)
			post_credit(conn);
	}
	while (conn->completed < conn->posted)
		progress(conn);
	disconnect_second(conn);
}
