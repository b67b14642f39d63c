// Connections on a QP of our own: rdma_init_qp_attr gives the attributes, the id never sees the QP.
#include "floor.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { RESOLVE_MS = 5000, RETRIES = 6, RNR_TIMER = 12, ACK_TIMEOUT = 14, RD_ATOMIC = 16 };
enum { ALL_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC };

static struct rdma_addrinfo *address(const char *host, const char *port, bool passive)
{
	struct rdma_addrinfo hints = {.ai_flags = RAI_NUMERICHOST | (passive ? RAI_PASSIVE : 0), .ai_port_space = RDMA_PS_TCP};
	struct rdma_addrinfo *found;
	check(rdma_getaddrinfo(host, port, &hints, &found), "rdma_getaddrinfo");
	return found;
}

static struct sockaddr_storage numeric(const char *host)
{
	struct addrinfo hints = {.ai_flags = AI_NUMERICHOST}, *found;
	if (getaddrinfo(host, NULL, &hints, &found))
		fail("not a numeric address");
	struct sockaddr_storage addr = {0};
	memcpy(&addr, found->ai_addr, found->ai_addrlen);
	freeaddrinfo(found);
	return addr;
}

static void set_nonblocking(int fd)
{
	check(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK), "fcntl");
}

// Acknowledges the event and returns its type; keeps the private data of a response.
enum rdma_cm_event_type next_event(struct conn *conn)
{
	struct rdma_cm_event *event;
	check(rdma_get_cm_event(conn->events, &event), "rdma_get_cm_event");
	enum rdma_cm_event_type type = event->event;
	if (type == RDMA_CM_EVENT_CONNECT_RESPONSE && event->param.conn.private_data_len >= sizeof(conn->peer))
		memcpy(&conn->peer, event->param.conn.private_data, sizeof(conn->peer));
	rdma_ack_cm_event(event);
	return type;
}

static void expect(struct conn *conn, enum rdma_cm_event_type wanted)
{
	enum rdma_cm_event_type got = next_event(conn);
	if (got == wanted)
		return;
	fprintf(stderr, "expected %s, got %s\n", rdma_event_str(wanted), rdma_event_str(got));
	exit(1);
}

static void *pages(uint64_t bytes)
{
	void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
	if (!memory)
		die("aligned_alloc");
	memset(memory, 0, bytes);
	return memory;
}

// Each side's bytes differ, so that the client can tell what came from the server.
static void fill(struct conn *conn)
{
	bool atomic = conn->spec->op == OP_CAS || conn->spec->op == OP_FAA;
	memset(conn->local, conn->spec->server ? 0x5a : 0x3c, conn->stride * conn->spec->depth);
	memset(conn->target, atomic ? 0 : 0xa5, conn->stride);
}

static void create_memory(struct conn *conn)
{
	const struct spec *spec = conn->spec;
	conn->stride = (spec->size + 63) / 64 * 64;
	uint64_t bytes = conn->stride * (spec->depth + receive_depth(spec));
	conn->local = pages(bytes);
	conn->local_mr = ibv_reg_mr(conn->pd, conn->local, bytes, IBV_ACCESS_LOCAL_WRITE);
	conn->target = pages(conn->stride);
	conn->target_mr = ibv_reg_mr(conn->pd, conn->target, conn->stride, ALL_ACCESS);
	if (!conn->local_mr || !conn->target_mr)
		die("ibv_reg_mr");
	fill(conn);
}

static void add_to_epoll(struct conn *conn, int fd)
{
	struct epoll_event event = {EPOLLIN, {.fd = fd}};
	check(epoll_ctl(conn->both, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

static void watch_both(struct conn *conn)
{
	set_nonblocking(conn->channel->fd);
	conn->both = epoll_create1(EPOLL_CLOEXEC);
	if (conn->both < 0)
		die("epoll_create1");
	add_to_epoll(conn, conn->channel->fd);
	add_to_epoll(conn, conn->events->fd);
}

static void create_queues(struct conn *conn)
{
	const struct spec *spec = conn->spec;
	struct ibv_context *verbs = conn->id->verbs;
	uint32_t receives = receive_depth(spec);
	conn->pd = ibv_alloc_pd(verbs);
	if (!conn->pd)
		die("ibv_alloc_pd");
	conn->channel = ibv_create_comp_channel(verbs);
	if (!conn->channel)
		die("ibv_create_comp_channel");
	conn->cq = ibv_create_cq(verbs, spec->depth + 2 + receives, NULL, conn->channel, 0);
	if (!conn->cq)
		die("ibv_create_cq");
	struct ibv_qp_init_attr attr = {
		.send_cq = conn->cq,
		.recv_cq = conn->cq,
		// Two more than the depth: the credits of the rate measurement.
		.cap = {spec->depth + 2, receives, 1, 1, spec->inline_max},
		.qp_type = IBV_QPT_RC,
	};
	conn->qp = ibv_create_qp(conn->pd, &attr);
	if (!conn->qp)
		die("ibv_create_qp");
	if (spec->wait == WAIT_WATCH)
		watch_both(conn);
}

static void move_to(struct conn *conn, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state};
	int mask;
	check(rdma_init_qp_attr(conn->id, &attr, &mask), "rdma_init_qp_attr");
	if (state == IBV_QPS_INIT)
		attr.qp_access_flags = ALL_ACCESS;
	if (state == IBV_QPS_RTR) {
		attr.min_rnr_timer = RNR_TIMER;
		mask |= IBV_QP_MIN_RNR_TIMER;
	}
	check_errno(ibv_modify_qp(conn->qp, &attr, mask), "ibv_modify_qp");
}

static void create(struct conn *conn)
{
	create_queues(conn);
	create_memory(conn);
	move_to(conn, IBV_QPS_INIT);
	post_receives(conn, 0, receive_depth(conn->spec));
}

static struct hello hello_of(const struct conn *conn)
{
	return (struct hello){(uintptr_t)conn->target, conn->stride, conn->target_mr->rkey, getpid()};
}

static struct rdma_conn_param param_of(const struct conn *conn, const struct hello *hello)
{
	return (struct rdma_conn_param){
		.private_data = hello,
		.private_data_len = sizeof(*hello),
		.responder_resources = RD_ATOMIC,
		.initiator_depth = RD_ATOMIC,
		.retry_count = RETRIES,
		.rnr_retry_count = RETRIES,
		.qp_num = conn->qp->qp_num,
	};
}

static void set_ack_timeout(struct rdma_cm_id *id)
{
	uint8_t timeout = ACK_TIMEOUT;
	check(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof(timeout)), "rdma_set_option");
}

struct rdma_cm_id *listen_on(const struct spec *spec, struct rdma_event_channel **events)
{
	struct rdma_cm_id *id;
	struct rdma_addrinfo *local = address(spec->bind, spec->port, true);
	*events = rdma_create_event_channel();
	if (!*events)
		die("rdma_create_event_channel");
	check(rdma_create_id(*events, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
	check(rdma_bind_addr(id, local->ai_src_addr), "rdma_bind_addr");
	check(rdma_listen(id, 64), "rdma_listen");
	rdma_freeaddrinfo(local);
	return id;
}

static void take_request(struct conn *conn, struct rdma_event_channel *listener)
{
	struct rdma_cm_event *event;
	check(rdma_get_cm_event(listener, &event), "rdma_get_cm_event");
	if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST)
		fail("the listener got something else than a request");
	conn->id = event->id;
	memcpy(&conn->peer, event->param.conn.private_data, sizeof(conn->peer));
	rdma_ack_cm_event(event);
}

void accept_one(struct conn *conn, const struct spec *spec, struct rdma_event_channel *listener)
{
	memset(conn, 0, sizeof(*conn));
	conn->spec = spec;
	take_request(conn, listener);
	conn->events = rdma_create_event_channel();
	if (!conn->events)
		die("rdma_create_event_channel");
	check(rdma_migrate_id(conn->id, conn->events), "rdma_migrate_id");
	set_ack_timeout(conn->id);
	create(conn);
	move_to(conn, IBV_QPS_RTR);
	move_to(conn, IBV_QPS_RTS);
	struct hello hello = hello_of(conn);
	struct rdma_conn_param param = param_of(conn, &hello);
	check(rdma_accept(conn->id, &param), "rdma_accept");
	enum rdma_cm_event_type first = next_event(conn);
	// A peer that disconnects at once can be heard of before the message that establishes.
	conn->ended = first == RDMA_CM_EVENT_DISCONNECTED;
	if (!conn->ended && first != RDMA_CM_EVENT_ESTABLISHED)
		fail(rdma_event_str(first));
}

static void resolve(struct conn *conn)
{
	const struct spec *spec = conn->spec;
	conn->events = rdma_create_event_channel();
	if (!conn->events)
		die("rdma_create_event_channel");
	check(rdma_create_id(conn->events, &conn->id, NULL, RDMA_PS_TCP), "rdma_create_id");
	struct rdma_addrinfo *remote = address(spec->peer, spec->port, false);
	struct sockaddr_storage source = numeric(spec->bind);
	check(rdma_resolve_addr(conn->id, (struct sockaddr *)&source, remote->ai_dst_addr, RESOLVE_MS), "rdma_resolve_addr");
	expect(conn, RDMA_CM_EVENT_ADDR_RESOLVED);
	check(rdma_resolve_route(conn->id, RESOLVE_MS), "rdma_resolve_route");
	expect(conn, RDMA_CM_EVENT_ROUTE_RESOLVED);
	rdma_freeaddrinfo(remote);
}

static void connect_id(struct conn *conn)
{
	set_ack_timeout(conn->id);
	struct hello hello = hello_of(conn);
	struct rdma_conn_param param = param_of(conn, &hello);
	check(rdma_connect(conn->id, &param), "rdma_connect");
	expect(conn, RDMA_CM_EVENT_CONNECT_RESPONSE);
	move_to(conn, IBV_QPS_RTR);
	move_to(conn, IBV_QPS_RTS);
	check(rdma_establish(conn->id), "rdma_establish");
}

void connect_to(struct conn *conn, const struct spec *spec, struct phases *phases)
{
	memset(conn, 0, sizeof(*conn));
	conn->spec = spec;
	uint64_t start = now_ns();
	resolve(conn);
	uint64_t resolved = now_ns();
	create(conn);
	uint64_t created = now_ns();
	connect_id(conn);
	phases->resolve = resolved - start;
	phases->create = created - resolved;
	phases->connect = now_ns() - created;
}

void disconnect_first(struct conn *conn)
{
	check(rdma_disconnect(conn->id), "rdma_disconnect");
	expect(conn, RDMA_CM_EVENT_DISCONNECTED);
}

void disconnect_second(struct conn *conn)
{
	if (!conn->ended)
		expect(conn, RDMA_CM_EVENT_DISCONNECTED);
	rdma_disconnect(conn->id); // refused if the peer's request already ended it: then there is nothing to answer
}

void destroy(struct conn *conn)
{
	if (conn->unacked)
		ibv_ack_cq_events(conn->cq, conn->unacked);
	if (conn->spec->wait == WAIT_WATCH)
		close(conn->both);
	check_errno(ibv_destroy_qp(conn->qp), "ibv_destroy_qp");
	check_errno(ibv_destroy_cq(conn->cq), "ibv_destroy_cq");
	check_errno(ibv_destroy_comp_channel(conn->channel), "ibv_destroy_comp_channel");
	check_errno(ibv_dereg_mr(conn->local_mr), "ibv_dereg_mr");
	check_errno(ibv_dereg_mr(conn->target_mr), "ibv_dereg_mr");
	check_errno(ibv_dealloc_pd(conn->pd), "ibv_dealloc_pd");
	check(rdma_destroy_id(conn->id), "rdma_destroy_id");
	rdma_destroy_event_channel(conn->events);
	free(conn->local);
	free(conn->target);
	free(conn->marks);
}
