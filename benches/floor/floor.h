// The floor: what raw verbs and librdmacm need for one operation, with nothing of a library around it.
// Every measurement of the Rust benchmark (../src/bin/rdma-bench.rs) is done here by the same steps:
// same queue depths, signaling, inline limit, way of waiting, retry counters and wire protocol.
#ifndef FLOOR_H
#define FLOOR_H

#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdint.h>

enum mode { MODE_LATENCY, MODE_RATE, MODE_CONNECT, MODE_TRUTH };
enum op { OP_SEND, OP_WRITE, OP_WRITE_IMM, OP_READ, OP_CAS, OP_FAA };
// EVENT blocks in ibv_get_cq_event; WATCH sleeps on the CM's fd too, as a program that must notice a dead peer does.
enum wait { WAIT_EVENT, WAIT_WATCH, WAIT_HYBRID, WAIT_SPIN };

// One measurement. Both sides get the same one on their command lines.
struct spec {
	bool server;
	const char *bind, *peer, *port;
	enum mode mode;
	enum op op;
	enum wait wait;
	uint32_t size;       // bytes of payload
	uint32_t iters;      // operations that are measured
	uint32_t warmup;     // operations before those
	uint32_t depth;      // most operations in flight
	uint32_t batch;      // work requests per doorbell
	uint32_t signal;     // every so many'th operation asks for a completion
	uint32_t inline_max; // payloads up to this many bytes are sent inline
	uint32_t spin_us;    // how long HYBRID polls before it sleeps
	bool samples;        // take a time stamp around each operation
	uint32_t limit_s;    // the process is killed after this many seconds
};

struct spec parse_spec(int argc, char **argv);
const char *mode_name(enum mode mode);
const char *op_name(enum op op);
const char *wait_name(enum wait wait);
bool op_consumes_receive(enum op op);
uint32_t receive_depth(const struct spec *spec);

// What travels in the private data of connect and accept, little endian like every machine that this runs on.
struct hello {
	uint64_t addr;
	uint64_t len;
	uint32_t rkey;
	uint32_t pid;
} __attribute__((packed));

// Counted over the measured operations only.
struct counts {
	uint64_t doorbells, completions, arms, wakeups, allocations;
};

struct conn {
	const struct spec *spec;
	struct rdma_event_channel *events;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	uint8_t *local, *target; // send slots then receive slots; what the peer reads, writes and adds to
	struct ibv_mr *local_mr, *target_mr;
	uint64_t stride; // bytes from one slot to the next
	struct hello peer;

	uint64_t posted, completed; // sends, in order; an operation is in flight from one to the other
	uint64_t failed;            // completions with an error
	uint64_t received;          // receive completions; each is posted again at once
	int both; // the epoll descriptor of WATCH
	bool armed;
	bool ended; // the peer disconnected before anything else was heard of it
	unsigned unacked;
	struct counts counts;
	uint64_t *marks; // the time after each MARK_EVERY measured operations
	uint32_t marked;
};

enum { MARK_EVERY = 64 };

// conn.c: connection set-up and tear-down, one function per phase.
struct phases {
	uint64_t resolve, create, connect, disconnect, destroy; // nanoseconds
};
struct rdma_cm_id *listen_on(const struct spec *spec, struct rdma_event_channel **events);
void accept_one(struct conn *conn, const struct spec *spec, struct rdma_event_channel *listener);
void connect_to(struct conn *conn, const struct spec *spec, struct phases *phases);
void disconnect_first(struct conn *conn);  // the side that ends it
void disconnect_second(struct conn *conn); // the side that is told
void destroy(struct conn *conn);
enum rdma_cm_event_type next_event(struct conn *conn);

// queue.c: the data path.
void post_receives(struct conn *conn, uint32_t first_slot, uint32_t count);
void post_ops(struct conn *conn, uint32_t count, uint64_t end); // one doorbell; the last of `end` is signaled
void post_credit(struct conn *conn);
void progress(struct conn *conn); // polls once and, if nothing was there, waits as the spec says
int poll_once(struct conn *conn);
void count_from_here(struct conn *conn); // the measured part begins
void mark(struct conn *conn, uint64_t measured); // called after each operation or batch

// The four measurements; each has the two roles in one file.
void latency_client(struct conn *conn);
void latency_server(struct conn *conn);
void rate_client(struct conn *conn);
void rate_server(struct conn *conn);
void connect_client(const struct spec *spec);
void connect_server(const struct spec *spec, struct rdma_event_channel *listener);
void truth_client(struct conn *conn);
void truth_server(struct conn *conn);

// report.c
uint64_t now_ns(void);
uint64_t allocations(void);
struct result {
	uint64_t total_ns;
	const uint64_t *samples; // may be null
	bool verified;
};
void report_ops(const struct conn *conn, struct result result);
void report_connect(const struct spec *spec, const struct phases *each);
void report_truth(const struct conn *conn, uint64_t total_ns, uint64_t ok, uint64_t failed);

void die(const char *call) __attribute__((noreturn));   // errno says why
void fail(const char *reason) __attribute__((noreturn)); // the reason says it all
void check(int ret, const char *call);                   // rdma_*: -1 and errno
void check_errno(int error, const char *call);           // ibv_*: a positive errno

#endif
