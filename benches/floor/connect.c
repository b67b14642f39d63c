// One connection after the other, each phase timed on the active side.
#include "floor.h"

#include <stdlib.h>

static struct phases once(const struct spec *spec)
{
	struct conn conn;
	struct phases phases;
	connect_to(&conn, spec, &phases);
	uint64_t start = now_ns();
	disconnect_first(&conn);
	uint64_t disconnected = now_ns();
	destroy(&conn);
	phases.disconnect = disconnected - start;
	phases.destroy = now_ns() - disconnected;
	return phases;
}

void connect_client(const struct spec *spec)
{
	struct phases *each = calloc(spec->iters, sizeof(*each));
	for (uint32_t i = 0; i < spec->warmup; i++)
		once(spec);
	for (uint32_t i = 0; i < spec->iters; i++)
		each[i] = once(spec);
	report_connect(spec, each);
	free(each);
}

void connect_server(const struct spec *spec, struct rdma_event_channel *listener)
{
	for (uint32_t i = 0; i < spec->warmup + spec->iters; i++) {
		struct conn conn;
		accept_one(&conn, spec, listener);
		disconnect_second(&conn);
		destroy(&conn);
	}
}
