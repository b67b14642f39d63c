// The data path: post, poll, wait. Nothing here allocates; the work requests are on the stack.
#include "floor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

enum { MAX_BATCH = 64, POLL_BATCH = 16, ACK_BATCH = 64 };
static const uint64_t RECEIVE = 1ull << 63; // in wr_id: a receive, and its slot; otherwise the number of the send

static uint64_t send_slot(const struct conn *conn, uint64_t number)
{
	return (uintptr_t)conn->local + number % conn->spec->depth * conn->stride;
}

static uint64_t receive_slot(const struct conn *conn, uint32_t slot)
{
	return (uintptr_t)conn->local + (conn->spec->depth + slot) * conn->stride;
}

static struct ibv_sge receive_sge(const struct conn *conn, uint32_t slot)
{
	return (struct ibv_sge){receive_slot(conn, slot), conn->spec->size, conn->local_mr->lkey};
}

static void post_receive(struct conn *conn, uint32_t slot)
{
	struct ibv_sge sge = receive_sge(conn, slot);
	struct ibv_recv_wr wr = {.wr_id = RECEIVE | slot, .sg_list = &sge, .num_sge = 1}, *bad;
	check_errno(ibv_post_recv(conn->qp, &wr, &bad), "ibv_post_recv");
}

void post_receives(struct conn *conn, uint32_t first_slot, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		post_receive(conn, first_slot + i);
}

static void fill(const struct conn *conn, struct ibv_send_wr *wr, struct ibv_sge *sge, uint64_t number)
{
	static const enum ibv_wr_opcode OPCODES[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
		IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD};
	const struct spec *spec = conn->spec;
	*sge = (struct ibv_sge){send_slot(conn, number), spec->size, conn->local_mr->lkey};
	*wr = (struct ibv_send_wr){.wr_id = number, .sg_list = sge, .num_sge = 1, .opcode = OPCODES[spec->op]};
	switch (spec->op) {
	case OP_SEND:
		break;
	case OP_WRITE_IMM:
		wr->imm_data = htobe32(number); // and the address, as for a write
		/* fall through */
	case OP_WRITE:
	case OP_READ:
		wr->wr.rdma.remote_addr = conn->peer.addr;
		wr->wr.rdma.rkey = conn->peer.rkey;
		break;
	case OP_CAS:
	case OP_FAA:
		wr->wr.atomic.remote_addr = conn->peer.addr;
		wr->wr.atomic.rkey = conn->peer.rkey;
		// The word counts the operations: a swap expects the one before it, an addition adds one.
		wr->wr.atomic.compare_add = spec->op == OP_FAA ? 1 : number;
		wr->wr.atomic.swap = number + 1;
		break;
	}
	bool may_inline = spec->op == OP_SEND || spec->op == OP_WRITE || spec->op == OP_WRITE_IMM;
	if (may_inline && spec->size <= spec->inline_max)
		wr->send_flags |= IBV_SEND_INLINE;
}

void post_ops(struct conn *conn, uint32_t count, uint64_t end)
{
	struct ibv_send_wr wrs[MAX_BATCH], *bad;
	struct ibv_sge sges[MAX_BATCH];
	for (uint32_t i = 0; i < count; i++) {
		uint64_t number = conn->posted + i;
		fill(conn, &wrs[i], &sges[i], number);
		if ((number + 1) % conn->spec->signal == 0 || number + 1 == end)
			wrs[i].send_flags |= IBV_SEND_SIGNALED;
		wrs[i].next = i + 1 < count ? &wrs[i + 1] : NULL;
	}
	check_errno(ibv_post_send(conn->qp, wrs, &bad), "ibv_post_send");
	conn->posted += count;
	conn->counts.doorbells++;
}

// An empty message that lets the sender post more. It counts as a send of ours, always signaled.
void post_credit(struct conn *conn)
{
	struct ibv_send_wr wr = {.wr_id = conn->posted, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	check_errno(ibv_post_send(conn->qp, &wr, &bad), "ibv_post_send");
	conn->posted++;
	conn->counts.doorbells++;
}

static void take(struct conn *conn, const struct ibv_wc *wc)
{
	conn->counts.completions++;
	if (wc->status != IBV_WC_SUCCESS) {
		if (conn->spec->mode != MODE_TRUTH) {
			fprintf(stderr, "completion failed: %s\n", ibv_wc_status_str(wc->status));
			exit(1);
		}
		conn->failed += !(wc->wr_id & RECEIVE);
		return;
	}
	if (!(wc->wr_id & RECEIVE)) {
		conn->completed = wc->wr_id + 1; // in order: all before it are done too
		return;
	}
	conn->received++;
	post_receive(conn, wc->wr_id & UINT32_MAX);
}

int poll_once(struct conn *conn)
{
	struct ibv_wc wcs[POLL_BATCH];
	int count = ibv_poll_cq(conn->cq, POLL_BATCH, wcs);
	if (count < 0)
		fail("ibv_poll_cq failed");
	for (int i = 0; i < count; i++)
		take(conn, &wcs[i]);
	return count;
}

static bool get_event(struct conn *conn)
{
	struct ibv_cq *cq;
	void *context;
	if (ibv_get_cq_event(conn->channel, &cq, &context)) {
		if (errno == EAGAIN)
			return false;
		die("ibv_get_cq_event");
	}
	conn->armed = false;
	if (++conn->unacked == ACK_BATCH) {
		ibv_ack_cq_events(conn->cq, conn->unacked);
		conn->unacked = 0;
	}
	return true;
}

// One descriptor for the completion channel and the CM: epoll is 250 instructions a sleep cheaper than poll.
static void watch(struct conn *conn)
{
	struct epoll_event ready[2];
	do {
		int count = epoll_wait(conn->both, ready, 2, -1);
		if (count < 0)
			die("epoll_wait");
		for (int i = 0; i < count; i++)
			if (ready[i].data.fd == conn->events->fd) {
				if (conn->spec->mode == MODE_TRUTH)
					return;
				fail("the connection ended in the middle of a measurement");
			}
	} while (!get_event(conn));
}

// Arm, poll again, sleep: a completion between the last poll and the arming would otherwise be slept through.
static void sleep_for_event(struct conn *conn)
{
	if (!conn->armed) {
		check_errno(ibv_req_notify_cq(conn->cq, 0), "ibv_req_notify_cq");
		conn->armed = true;
		conn->counts.arms++;
		if (poll_once(conn))
			return;
	}
	conn->counts.wakeups++;
	if (conn->spec->wait == WAIT_WATCH)
		watch(conn);
	else
		get_event(conn);
}

static bool spin(struct conn *conn)
{
	uint64_t end = now_ns() + conn->spec->spin_us * 1000ull;
	do {
		if (poll_once(conn))
			return true;
	} while (now_ns() < end);
	return false;
}

void progress(struct conn *conn)
{
	if (poll_once(conn))
		return;
	switch (conn->spec->wait) {
	case WAIT_SPIN:
		return;
	case WAIT_HYBRID:
		if (spin(conn))
			return;
		/* fall through */
	case WAIT_EVENT:
	case WAIT_WATCH:
		sleep_for_event(conn);
	}
}

void count_from_here(struct conn *conn)
{
	conn->marks = calloc(conn->spec->iters / MARK_EVERY + 1, sizeof(*conn->marks));
	conn->marks[conn->marked++] = now_ns();
	conn->counts = (struct counts){.allocations = allocations()};
}

void mark(struct conn *conn, uint64_t measured)
{
	if (measured >= (uint64_t)conn->marked * MARK_EVERY)
		conn->marks[conn->marked++] = now_ns();
}
