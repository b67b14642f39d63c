// One JSON line per measurement, the same keys as rdma-bench prints.
#include "floor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Counts the allocations of this process, rdma-core's included.
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
static uint64_t allocated;
void *malloc(size_t size) { allocated++; return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { allocated++; return __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { allocated++; return __libc_realloc(old, size); }
uint64_t allocations(void) { return allocated; }

uint64_t now_ns(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

void fail(const char *reason)
{
	fprintf(stderr, "%s\n", reason);
	exit(1);
}

void die(const char *call)
{
	fprintf(stderr, "%s: %s\n", call, strerror(errno));
	exit(1);
}

void check(int ret, const char *call)
{
	if (ret)
		die(call);
}

void check_errno(int error, const char *call)
{
	if (!error)
		return;
	errno = error;
	die(call);
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

static double quantile_us(const uint64_t *sorted, uint32_t count, double q)
{
	return sorted[(uint32_t)((count - 1) * q + 0.5)] / 1e3;
}

// Of an operation, in the middle one of the stretches between two marks: without the odd timer tick in it.
static double steady_us(const struct conn *conn)
{
	uint32_t count = conn->marked - 1;
	if (!count)
		return 0;
	uint64_t *stretches = malloc(count * sizeof(*stretches));
	for (uint32_t i = 0; i < count; i++)
		stretches[i] = conn->marks[i + 1] - conn->marks[i];
	qsort(stretches, count, sizeof(*stretches), compare);
	double middle = quantile_us(stretches, count, .5) / MARK_EVERY;
	free(stretches);
	return middle;
}

static void print_spec(const struct spec *spec)
{
	printf("{\"mode\":\"%s\",\"op\":\"%s\",\"wait\":\"%s\",\"size\":%u,\"iters\":%u,\"depth\":%u,\"batch\":%u,\"signal\":%u,"
	       "\"inline\":%u",
	       mode_name(spec->mode), op_name(spec->op), wait_name(spec->wait), spec->size, spec->iters, spec->depth,
	       spec->batch, spec->signal, spec->inline_max);
}

void report_ops(const struct conn *conn, struct result result)
{
	const struct spec *spec = conn->spec;
	struct counts counts = conn->counts;
	counts.allocations = allocated - counts.allocations;
	double seconds = result.total_ns / 1e9, rate = spec->iters / seconds;
	print_spec(spec);
	if (result.samples) {
		uint64_t *sorted = malloc(spec->iters * sizeof(*sorted));
		memcpy(sorted, result.samples, spec->iters * sizeof(*sorted));
		qsort(sorted, spec->iters, sizeof(*sorted), compare);
		printf(",\"p50_us\":%.3f,\"p99_us\":%.3f", quantile_us(sorted, spec->iters, .5), quantile_us(sorted, spec->iters, .99));
		free(sorted);
	}
	printf(",\"steady_us\":%.4f,\"mean_us\":%.3f,\"ops_per_s\":%.1f,\"mb_per_s\":%.3f,\"total_ns\":%lu,\"doorbells\":%lu,\"completions\":%lu,"
	       "\"arms\":%lu,\"wakeups\":%lu,\"allocations\":%lu,\"verified\":%s}\n",
	       steady_us(conn), seconds * 1e6 / spec->iters, rate, rate * spec->size / 1e6, result.total_ns, counts.doorbells,
	       counts.completions, counts.arms, counts.wakeups, counts.allocations, result.verified ? "true" : "false");
}

static double median_us(const struct phases *each, uint32_t count, size_t offset)
{
	uint64_t *values = malloc(count * sizeof(*values));
	for (uint32_t i = 0; i < count; i++)
		memcpy(&values[i], (const char *)&each[i] + offset, sizeof(*values));
	qsort(values, count, sizeof(*values), compare);
	double median = quantile_us(values, count, .5);
	free(values);
	return median;
}

void report_connect(const struct spec *spec, const struct phases *each)
{
	print_spec(spec);
	printf(",\"resolve_us\":%.1f,\"create_us\":%.1f,\"connect_us\":%.1f,\"disconnect_us\":%.1f,\"destroy_us\":%.1f}\n",
	       median_us(each, spec->iters, offsetof(struct phases, resolve)),
	       median_us(each, spec->iters, offsetof(struct phases, create)),
	       median_us(each, spec->iters, offsetof(struct phases, connect)),
	       median_us(each, spec->iters, offsetof(struct phases, disconnect)),
	       median_us(each, spec->iters, offsetof(struct phases, destroy)));
}

void report_truth(const struct conn *conn, uint64_t total_ns, uint64_t ok, uint64_t failed)
{
	print_spec(conn->spec);
	printf(",\"truth_ms\":%.3f,\"ok\":%lu,\"failed\":%lu}\n", total_ns / 1e6, ok, failed);
}
