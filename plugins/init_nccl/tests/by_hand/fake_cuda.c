/* A CUDA runtime of one device that computes nothing, and an NCCL whose communicators do the bootstrap alone: enough to run torch's own
 * ProcessGroupNCCL, compiled as it is shipped, on a machine without a GPU. Preload it. Everything about ids is real: ncclGetUniqueId is
 * NCCL's, hellos and answers go over sockets. Each communicator is told in the file FAKE_NCCL_LOG, one JSON object a line. */
#include <arpa/inet.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct { char bytes[128]; } unique_id;
enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3 };

/* ---- cuda */

#define DOES_NOTHING(name) int name() { return OK; }
#define SETS(name, type, value) int name(type *out) { *out = value; return OK; }
DOES_NOTHING(cudaSetDevice) DOES_NOTHING(cudaGetLastError) DOES_NOTHING(cudaPeekAtLastError) DOES_NOTHING(cudaDeviceSynchronize)
DOES_NOTHING(cudaStreamDestroy) DOES_NOTHING(cudaStreamQuery) DOES_NOTHING(cudaStreamSynchronize) DOES_NOTHING(cudaStreamWaitEvent)
DOES_NOTHING(cudaEventRecord) DOES_NOTHING(cudaEventRecordWithFlags) DOES_NOTHING(cudaEventQuery) DOES_NOTHING(cudaEventSynchronize)
DOES_NOTHING(cudaEventDestroy) DOES_NOTHING(cudaFree) DOES_NOTHING(cudaFreeHost) DOES_NOTHING(cudaThreadExchangeStreamCaptureMode)
DOES_NOTHING(cudaGetDriverEntryPointByVersion) DOES_NOTHING(cuInit) DOES_NOTHING(cuGetProcAddress_v2)
SETS(cudaGetDeviceCount, int, 1) SETS(cudaGetDevice, int, 0) SETS(cudaDriverGetVersion, int, 13000)
SETS(cudaRuntimeGetVersion, int, 13000) SETS(cuDriverGetVersion, int, 13000)
int cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return OK; }
int cudaStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return OK; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { (void)stream; *status = 0; return OK; }
int cudaStreamGetPriority(void *stream, int *priority) { (void)stream; *priority = 0; return OK; }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { (void)a; (void)b; *can = 0; return OK; }
int cudaDeviceGetAttribute(int *value, int what, int device) { (void)what; (void)device; *value = 1; return OK; }
int cudaGetDeviceProperties(void *properties, int device) { (void)device; memset(properties, 0, 512); return OK; }
int cudaMemGetInfo(size_t *left, size_t *all) { *left = *all = (size_t)1 << 30; return OK; }
int cudaMalloc(void **p, size_t size) { *p = aligned_alloc(512, (size + 511) / 512 * 512); return OK; }
int cudaHostAlloc(void **p, size_t size, unsigned flags) { (void)flags; *p = malloc(size); return OK; }
int cudaEventElapsedTime(float *ms, void *a, void *b) { (void)a; (void)b; *ms = 0; return OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 1; return OK; }
static char handles[64]; /* streams and events are all the same one */
int cudaStreamCreateWithPriority(void **s) { *s = handles; return OK; }
int cudaStreamCreateWithFlags(void **s) { *s = handles; return OK; }
int cudaEventCreateWithFlags(void **e) { *e = handles; return OK; }
int cudaEventCreate(void **e) { *e = handles; return OK; }

/* ---- nccl: collectives */

DOES_NOTHING(ncclGroupStart) DOES_NOTHING(ncclGroupEnd) DOES_NOTHING(ncclAllReduce) DOES_NOTHING(ncclSend) DOES_NOTHING(ncclRecv)
DOES_NOTHING(ncclCommFinalize) DOES_NOTHING(ncclCommRevoke)
int ncclCommAbort(void *comm) { free(comm); return OK; }
int ncclCommDestroy(void *comm) { free(comm); return OK; }
int ncclCommGetAsyncError(void *comm, int *result) { (void)comm; *result = OK; return OK; }

/* ---- nccl: bootstrap, up to the address of the next rank */

static int root_of(int rank, int ranks, int roots) {
  int each = ranks / roots, more = ranks % roots, first = more * (each + 1);
  return rank < first ? rank / (each + 1) : (rank - first) / each + more;
}

static int whole(int fd, char *data, size_t size, int writing) {
  while (size) {
    ssize_t done = writing ? write(fd, data, size) : read(fd, data, size);
    if (done <= 0) return SYSTEM_ERROR;
    data += done;
    size -= done;
  }
  return OK;
}

static int hello(const unique_id *id, int rank, int ranks, int root, int roots, const struct sockaddr_in *own, int number) {
  char data[16 + 176] = {0};
  int32_t kind = 1, size = 176, head[5] = {rank, ranks, root, roots, 0}, fd, result;
  memcpy(data, id->bytes, 8);
  memcpy(data + 8, &kind, 4);
  memcpy(data + 12, &size, 4);
  memcpy(data + 16, head, 20);
  memcpy(data + 36, own, sizeof *own);
  memcpy(data + 64, &number, 4);
  fd = socket(AF_INET, SOCK_STREAM, 0);
  result = connect(fd, (const struct sockaddr *)(id->bytes + 8), sizeof *own) ? SYSTEM_ERROR : whole(fd, data, sizeof data, 1);
  close(fd);
  return result;
}

static int bootstrap(int ranks, int rank, int roots, const unique_id *ids, int *next) {
  struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof own;
  int root = root_of(rank, ranks, roots), before = (rank + ranks - 1) % ranks, fd, result;
  int listening = socket(AF_INET, SOCK_STREAM, 0);
  char data[16 + 128];
  bind(listening, (struct sockaddr *)&own, sizeof own);
  listen(listening, 8);
  getsockname(listening, (struct sockaddr *)&own, &length);
  result = hello(&ids[root], rank, ranks, root, roots, &own, rank + 1);
  if (!result && roots > 1 && (rank == 0 || root_of(rank - 1, ranks, roots) != root)) {
    int other = root_of(before, ranks, roots);
    result = hello(&ids[other], before + 1, ranks, other, roots, &own, rank + 1); /* a root takes zeros for nothing */
  }
  struct pollfd waiting = {.fd = listening, .events = POLLIN};
  if (!result && poll(&waiting, 1, 30000) < 1) result = SYSTEM_ERROR;
  if (!result) {
    fd = accept(listening, 0, 0);
    result = whole(fd, data, 16, 0);
    int32_t size;
    memcpy(&size, data + 12, 4);
    if (!result && (memcmp(data, ids[root].bytes, 8) || size > 128)) result = INTERNAL_ERROR; /* as for a message that is too long */
    if (!result) result = whole(fd, data + 16, 128, 0);
    memcpy(next, data + 16, 4);
    --*next;
    close(fd);
  }
  close(listening);
  return result;
}

static int join(void **comm, int ranks, int rank, int roots, const unique_id *ids) {
  int next = -1, result = bootstrap(ranks, rank, roots, ids, &next);
  FILE *file = fopen(getenv("FAKE_NCCL_LOG"), "a");
  fprintf(file, "{\"ranks\": %d, \"rank\": %d, \"next\": %d, \"result\": %d, \"ids\": [", ranks, rank, next, result);
  for (int i = 0; i < roots; i++) {
    fprintf(file, i ? ", \"" : "\"");
    for (int j = 0; j < 128; j++) fprintf(file, "%02x", (unsigned char)ids[i].bytes[j]);
    fprintf(file, "\"");
  }
  fprintf(file, "]}\n");
  fclose(file);
  *comm = malloc(1 << 16);
  return result;
}
int ncclCommInitRankScalable(void **comm, int ranks, int rank, int roots, unique_id *ids) { return join(comm, ranks, rank, roots, ids); }
int ncclCommInitRankConfig(void **comm, int ranks, unique_id id, int rank) { return join(comm, ranks, rank, 1, &id); }
