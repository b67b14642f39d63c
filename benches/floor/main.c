#include "floor.h"

#include <stdio.h>
#include <unistd.h>

static void client(const struct spec *spec)
{
	if (spec->mode == MODE_CONNECT) {
		connect_client(spec);
		return;
	}
	struct conn conn;
	struct phases phases;
	connect_to(&conn, spec, &phases);
	if (spec->mode == MODE_TRUTH) {
		truth_client(&conn);
		return; // nobody is left to disconnect from
	}
	spec->mode == MODE_RATE ? rate_client(&conn) : latency_client(&conn);
	disconnect_first(&conn);
	destroy(&conn);
}

static void server(const struct spec *spec)
{
	struct rdma_event_channel *listener;
	struct rdma_cm_id *id = listen_on(spec, &listener);
	puts("listening");
	fflush(stdout);
	if (spec->mode == MODE_CONNECT) {
		connect_server(spec, listener);
		return;
	}
	struct conn conn;
	accept_one(&conn, spec, listener);
	rdma_destroy_id(id);
	switch (spec->mode) {
	case MODE_LATENCY: latency_server(&conn); break;
	case MODE_RATE: rate_server(&conn); break;
	case MODE_TRUTH: truth_server(&conn); break;
	case MODE_CONNECT: break;
	}
	destroy(&conn);
}

int main(int argc, char **argv)
{
	struct spec spec = parse_spec(argc, argv);
	alarm(spec.limit_s); // kills a measurement that hangs
	spec.server ? server(&spec) : client(&spec);
	return 0;
}
