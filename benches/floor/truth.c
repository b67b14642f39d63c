// The peer is killed while `depth` operations are in flight: how long until each of them has its outcome?
// Raw verbs flush nothing by themselves: on DISCONNECTED the program moves its QP to the error state and polls.
#include "floor.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

static void flush(struct conn *conn)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	check_errno(ibv_modify_qp(conn->qp, &attr, IBV_QP_STATE), "ibv_modify_qp");
}

static bool peer_is_gone(struct conn *conn)
{
	struct pollfd fd = {conn->events->fd, POLLIN, 0};
	return poll(&fd, 1, 0) > 0 && next_event(conn) != RDMA_CM_EVENT_ESTABLISHED;
}

void truth_client(struct conn *conn)
{
	uint64_t depth = conn->spec->depth;
	bool flushed = false;
	for (uint64_t i = 0; i < depth; i++)
		post_ops(conn, 1, depth);
	uint64_t start = now_ns();
	check(kill(conn->peer.pid, SIGKILL), "kill");
	while (conn->completed + conn->failed < depth) {
		progress(conn);
		if (!flushed && peer_is_gone(conn)) {
			flush(conn);
			flushed = true;
		}
	}
	report_truth(conn, now_ns() - start, conn->completed, conn->failed);
}

void truth_server(struct conn *conn)
{
	(void)conn;
	pause(); // until it is killed
}
