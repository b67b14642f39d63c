// The command line, word for word the one of rdma-bench.
#include "floor.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const MODES[] = {"latency", "rate", "connect", "truth", NULL};
static const char *const OPS[] = {"send", "write", "write-imm", "read", "cas", "faa", NULL};
static const char *const WAITS[] = {"event", "watch", "hybrid", "spin", NULL};

const char *mode_name(enum mode mode) { return MODES[mode]; }
const char *op_name(enum op op) { return OPS[op]; }
const char *wait_name(enum wait wait) { return WAITS[wait]; }

bool op_consumes_receive(enum op op) { return op == OP_SEND || op == OP_WRITE_IMM; }

// Twice the depth, so that a sender holding credits for all of them never meets an empty queue.
uint32_t receive_depth(const struct spec *spec) { return spec->depth < 8 ? 16 : 2 * spec->depth; }

static int word(const char *const *words, const char *given)
{
	for (int i = 0; words[i]; i++)
		if (!strcmp(words[i], given))
			return i;
	fprintf(stderr, "unknown word: %s\n", given);
	exit(2);
}

static uint32_t number(const char *given)
{
	char *end;
	unsigned long value = strtoul(given, &end, 10);
	if (*end || end == given || value > UINT32_MAX) {
		fprintf(stderr, "not a number: %s\n", given);
		exit(2);
	}
	return value;
}

static void require(bool holds, const char *rule)
{
	if (holds)
		return;
	fprintf(stderr, "refused: %s\n", rule);
	exit(2);
}

static void check_spec(const struct spec *spec)
{
	require(spec->bind, "--bind ADDRESS is needed");
	require(spec->server || spec->peer, "a client needs --peer ADDRESS");
	require(spec->iters > 0 && spec->depth > 0 && spec->batch > 0 && spec->signal > 0, "counts are at least 1");
	require(spec->batch <= 64, "--batch is at most 64");
	require(spec->batch <= spec->depth, "--batch is at most --depth");
	require(spec->signal <= spec->depth, "--signal is at most --depth");
	require((spec->op != OP_CAS && spec->op != OP_FAA) || spec->size == 8, "an atomic has 8 bytes");
}

struct spec parse_spec(int argc, char **argv)
{
	struct spec spec = {
		.port = "18515", .size = 64, .iters = 1000, .warmup = 100, .depth = 1, .batch = 1,
		.signal = 1, .spin_us = 200, .samples = true, .limit_s = 60,
	};
	static const struct option OPTIONS[] = {
		{"bind", 1, 0, 'b'}, {"peer", 1, 0, 'p'}, {"port", 1, 0, 'P'}, {"mode", 1, 0, 'm'}, {"op", 1, 0, 'o'},
		{"wait", 1, 0, 'w'}, {"size", 1, 0, 's'}, {"iters", 1, 0, 'n'}, {"warmup", 1, 0, 'u'}, {"depth", 1, 0, 'd'},
		{"batch", 1, 0, 'B'}, {"signal", 1, 0, 'S'}, {"inline", 1, 0, 'i'}, {"spin-us", 1, 0, 't'},
		{"no-samples", 0, 0, 'N'}, {"limit", 1, 0, 'l'}, {0},
	};
	if (argc < 2 || (strcmp(argv[1], "server") && strcmp(argv[1], "client"))) {
		fprintf(stderr, "usage: %s server|client --bind ADDRESS [--peer ADDRESS] [options as for rdma-bench]\n", argv[0]);
		exit(2);
	}
	spec.server = !strcmp(argv[1], "server");
	optind = 2;
	for (int option; (option = getopt_long(argc, argv, "", OPTIONS, NULL)) != -1;) {
		switch (option) {
		case 'b': spec.bind = optarg; break;
		case 'p': spec.peer = optarg; break;
		case 'P': spec.port = optarg; break;
		case 'm': spec.mode = word(MODES, optarg); break;
		case 'o': spec.op = word(OPS, optarg); break;
		case 'w': spec.wait = word(WAITS, optarg); break;
		case 's': spec.size = number(optarg); break;
		case 'n': spec.iters = number(optarg); break;
		case 'u': spec.warmup = number(optarg); break;
		case 'd': spec.depth = number(optarg); break;
		case 'B': spec.batch = number(optarg); break;
		case 'S': spec.signal = number(optarg); break;
		case 'i': spec.inline_max = number(optarg); break;
		case 't': spec.spin_us = number(optarg); break;
		case 'N': spec.samples = false; break;
		case 'l': spec.limit_s = number(optarg); break;
		default: exit(2);
		}
	}
	check_spec(&spec);
	return spec;
}
