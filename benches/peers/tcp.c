// TCP over the same wire: a ping-pong and a stream with blocking sockets, the plainest program one would write.
//   tcp server BIND PORT latency|rate SIZE COUNT
//   tcp client BIND PEER PORT latency|rate SIZE COUNT
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LIMIT_S = 60 };

static void check(int failed, const char *call)
{
	if (!failed)
		return;
	perror(call);
	exit(1);
}

static double now_us(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static struct sockaddr_in address(const char *host, int port)
{
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(port)};
	check(inet_pton(AF_INET, host, &addr.sin_addr) != 1, "inet_pton");
	return addr;
}

static int bound_socket(const char *host, int port)
{
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in addr = address(host, port);
	check(fd < 0, "socket");
	check(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), "SO_REUSEADDR");
	check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)), "TCP_NODELAY");
	check(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), "bind");
	return fd;
}

static void send_all(int fd, const char *bytes, size_t size)
{
	for (ssize_t sent; size; bytes += sent, size -= sent)
		check((sent = send(fd, bytes, size, MSG_NOSIGNAL)) <= 0, "send");
}

static void recv_all(int fd, char *bytes, size_t size)
{
	check(recv(fd, bytes, size, MSG_WAITALL) != (ssize_t)size, "recv");
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void latency(int fd, char *bytes, size_t size, int count)
{
	double *samples = calloc(count, sizeof(*samples)), start = now_us(), last = start;
	for (int i = 0; i < count; i++) {
		send_all(fd, bytes, size);
		recv_all(fd, bytes, size);
		double now = now_us();
		samples[i] = now - last;
		last = now;
	}
	double mean = (last - start) / count;
	qsort(samples, count, sizeof(*samples), compare);
	printf("{\"p50_us\":%.3f,\"p99_us\":%.3f,\"mean_us\":%.3f,\"ops_per_s\":%.1f,\"mb_per_s\":%.3f}\n", samples[count / 2],
	       samples[count * 99 / 100], mean, 1e6 / mean, size / mean);
	free(samples);
}

static void rate(int fd, char *bytes, size_t size, int count)
{
	double start = now_us();
	for (int i = 0; i < count; i++)
		send_all(fd, bytes, size);
	recv_all(fd, bytes, 1); // the last byte has arrived
	double mean = (now_us() - start) / count;
	printf("{\"mean_us\":%.3f,\"ops_per_s\":%.1f,\"mb_per_s\":%.3f}\n", mean, 1e6 / mean, size / mean);
}

static void serve(int fd, const char *mode, char *bytes, size_t size, int count)
{
	check(listen(fd, 1), "listen");
	puts("listening");
	fflush(stdout);
	int peer = accept(fd, NULL, NULL), one = 1;
	check(peer < 0, "accept");
	check(setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)), "TCP_NODELAY");
	for (int i = 0; i < count; i++) {
		recv_all(peer, bytes, size);
		if (!strcmp(mode, "latency"))
			send_all(peer, bytes, size);
	}
	send_all(peer, bytes, 1);
}

int main(int argc, char **argv)
{
	int server = argc > 1 && !strcmp(argv[1], "server");
	if (argc != (server ? 7 : 8)) {
		fprintf(stderr, "usage: tcp server BIND PORT latency|rate SIZE COUNT\n       tcp client BIND PEER PORT latency|rate SIZE COUNT\n");
		return 2;
	}
	alarm(LIMIT_S);
	const char *mode = argv[argc - 3];
	int port = atoi(argv[argc - 4]), count = atoi(argv[argc - 1]);
	size_t size = atol(argv[argc - 2]);
	char *bytes = calloc(1, size + 1);
	int fd = bound_socket(argv[2], server ? port : 0);
	if (server) {
		serve(fd, mode, bytes, size, count);
		return 0;
	}
	struct sockaddr_in peer = address(argv[3], port);
	check(connect(fd, (struct sockaddr *)&peer, sizeof(peer)), "connect");
	strcmp(mode, "latency") ? rate(fd, bytes, size, count) : latency(fd, bytes, size, count);
	return 0;
}
