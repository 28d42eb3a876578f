// NCCL between the simulated GPUs of one process (DataParallel) and of several, by a file in
// /dev/shm. A collective runs at once, in the calling thread. A rank waits for the others; where
// one of them has ended, it gets ncclRemoteError.
#include "simgpu.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int kMostRanks = 64;
constexpr size_t kSlot = 4 << 20;  // bytes that a rank sends at a time

// The beginning of the file; a slot for each rank follows.
struct Shared {
  std::atomic<int> present;
  std::atomic<int> arrived;
  std::atomic<int> round;
  std::atomic<int> aborted;
  std::atomic<int> process[kMostRanks];
};

enum Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter };

}  // namespace

struct ncclComm {
  int rank;
  int size;
  int team;        // of one process: its number; 0 between processes
  Shared* shared;  // between processes
  char* slots;
};

namespace {

struct Call {
  Kind kind;
  const char* send;
  char* receive;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t operation;
  int root;
  ncclComm_t comm;
};

using Sent = std::vector<const char*>;  // of each rank

thread_local int group_depth = 0;
thread_local std::vector<Call> queue;

size_t width(ncclDataType_t type) {
  if (type == ncclInt8 || type == ncclUint8) return 1;
  if (type == ncclFloat16 || type == ncclBfloat16) return 2;
  return type == ncclInt32 || type == ncclFloat32 ? 4 : 8;
}

template <class T>
ncclResult_t reduce_as(char* to, const Sent& sent, size_t count, ncclRedOp_t operation) {
  for (size_t i = 0; i < count; i++) {
    T value = reinterpret_cast<const T*>(sent[0])[i];
    for (size_t rank = 1; rank < sent.size(); rank++) {
      const T other = reinterpret_cast<const T*>(sent[rank])[i];
      switch (operation) {
        case ncclProd: value = value * other; break;
        case ncclMax: value = other > value ? other : value; break;
        case ncclMin: value = other < value ? other : value; break;
        default: value = value + other;
      }
    }
    if (operation == ncclAvg) value = value / T(sent.size());
    reinterpret_cast<T*>(to)[i] = value;
  }
  return ncclSuccess;
}

ncclResult_t reduce(char* to, const Sent& sent, const Call& call, size_t count) {
  switch (call.type) {
    case ncclInt8: return reduce_as<int8_t>(to, sent, count, call.operation);
    case ncclUint8: return reduce_as<uint8_t>(to, sent, count, call.operation);
    case ncclInt32: return reduce_as<int32_t>(to, sent, count, call.operation);
    case ncclInt64: return reduce_as<int64_t>(to, sent, count, call.operation);
    case ncclFloat16: return reduce_as<c10::Half>(to, sent, count, call.operation);
    case ncclBfloat16: return reduce_as<c10::BFloat16>(to, sent, count, call.operation);
    case ncclFloat32: return reduce_as<float>(to, sent, count, call.operation);
    case ncclFloat64: return reduce_as<double>(to, sent, count, call.operation);
    default: simgpu::refused("NCCL's type " + std::to_string(call.type));
  }
  return ncclInvalidArgument;
}

// How many elements each rank sends.
size_t sent_count(const Call& call) {
  return call.kind == kReduceScatter ? call.count * call.comm->size : call.count;
}

// Gives a rank what it receives of the elements from `begin` to `end`; `sent` starts at `begin`.
ncclResult_t receive(const Call& call, Sent sent, size_t begin, size_t end) {
  const size_t size = width(call.type);
  if (call.kind == kBroadcast) {
    memcpy(call.receive + begin * size, sent[call.root], (end - begin) * size);
    return ncclSuccess;
  }
  if (call.kind == kAllGather) {
    for (size_t rank = 0; rank < sent.size(); rank++) {
      memcpy(call.receive + (rank * call.count + begin) * size, sent[rank], (end - begin) * size);
    }
    return ncclSuccess;
  }
  if (call.kind == kReduce && call.comm->rank != call.root) return ncclSuccess;
  const size_t own = call.kind == kReduceScatter ? call.comm->rank * call.count : 0;
  const size_t first = std::max(begin, own);
  const size_t last = std::min(end, own + call.count);
  if (first >= last) return ncclSuccess;
  for (const char*& bytes : sent) bytes += (first - begin) * size;
  return reduce(call.receive + (first - own) * size, sent, call, last - first);
}

// A process that its parent has not waited for yet is there, too, in state Z.
bool has_ended(int process) {
  char path[32];
  char text[256] = "";
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE* file = fopen(path, "r");
  if (!file) return true;
  const size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  const char* state = strrchr(text, ')');  // after "number (name) "
  return !state || strlen(state) < 3 || state[2] == 'Z' || state[2] == 'X';
}

bool somebody_ended(const ncclComm& comm) {
  for (int rank = 0; rank < comm.size; rank++) {
    const int process = comm.shared->process[rank];
    if (process && has_ended(process)) return true;
  }
  return false;
}

ncclResult_t wait_for_all(ncclComm_t comm) {
  Shared& shared = *comm->shared;
  const int round = shared.round;
  if (++shared.arrived == comm->size) {
    shared.arrived = 0;
    shared.round++;
    return ncclSuccess;
  }
  for (long turn = 0; shared.round == round; turn++) {
    if (shared.aborted) return ncclInternalError;
    if (turn > 1000) usleep(turn > 20000 ? 1000 : 20);
    if (turn % 1000 == 999 && somebody_ended(*comm)) return ncclRemoteError;
  }
  return ncclSuccess;
}

ncclResult_t between_processes(const Call& call) {
  ncclComm_t comm = call.comm;
  const size_t size = width(call.type);
  const size_t count = sent_count(call);
  for (size_t begin = 0; begin < count; begin += kSlot / size) {
    const size_t end = std::min(begin + kSlot / size, count);
    memcpy(comm->slots + comm->rank * kSlot, call.send + begin * size, (end - begin) * size);
    if (ncclResult_t error = wait_for_all(comm)) return error;
    Sent sent;
    for (int rank = 0; rank < comm->size; rank++) sent.push_back(comm->slots + rank * kSlot);
    if (ncclResult_t error = receive(call, sent, begin, end)) return error;
    if (ncclResult_t error = wait_for_all(comm)) return error;
  }
  return ncclSuccess;
}

// The same call of each device of this process.
ncclResult_t within_process(const std::vector<Call>& calls) {
  std::vector<std::vector<char>> copies;  // a call may receive where another one sends
  Sent sent;
  for (const Call& call : calls) {
    copies.emplace_back(call.send, call.send + sent_count(call) * width(call.type));
    sent.push_back(copies.back().data());
  }
  for (const Call& call : calls) {
    if (ncclResult_t error = receive(call, sent, 0, sent_count(call))) return error;
  }
  return ncclSuccess;
}

ncclResult_t run(std::vector<Call> calls) {
  while (!calls.empty()) {
    const ncclComm first = *calls[0].comm;
    if (!first.team) {
      const Call call = calls[0];
      calls.erase(calls.begin());
      if (ncclResult_t error = between_processes(call)) return error;
      continue;
    }
    std::vector<Call> together(first.size);  // the next call of each rank of the team
    std::vector<Call> later;
    int found = 0;
    for (const Call& call : calls) {
      const bool next = call.comm->team == first.team && !together[call.comm->rank].comm;
      found += next;
      if (next) together[call.comm->rank] = call;
      if (!next) later.push_back(call);
    }
    if (found != first.size) return ncclInvalidUsage;
    if (ncclResult_t error = within_process(together)) return error;
    calls = later;
  }
  return ncclSuccess;
}

ncclResult_t run_queue() {
  std::vector<Call> calls;
  calls.swap(queue);
  return run(calls);
}

char* bytes(const void* address) {
  void* device = simgpu_bytes(address);
  return static_cast<char*>(device ? device : const_cast<void*>(address));
}

ncclResult_t add(const char* name, Kind kind, const void* send, void* receive, size_t count,
                 ncclDataType_t type, ncclRedOp_t operation, int root, ncclComm_t comm) {
  simgpu_count(name);
  if (simgpu::broken()) return ncclUnhandledCudaError;
  if (!receive) receive = const_cast<void*>(send);  // reduce: only the root receives
  queue.push_back({kind, bytes(send), bytes(receive), count, type, operation, root, comm});
  return group_depth ? ncclSuccess : run_queue();
}

}  // namespace

// ---- collectives ----

SIMGPU_API ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}
SIMGPU_API ncclResult_t ncclGroupEnd() { return --group_depth ? ncclSuccess : run_queue(); }

SIMGPU_API ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count,
                                      ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm,
                                      cudaStream_t) {
  return add(__func__, kAllReduce, send, receive, count, type, operation, 0, comm);
}
SIMGPU_API ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count,
                                      ncclDataType_t type, int root, ncclComm_t comm,
                                      cudaStream_t) {
  return add(__func__, kBroadcast, send, receive, count, type, ncclSum, root, comm);
}
SIMGPU_API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t) {
  return add(__func__, kBroadcast, buffer, buffer, count, type, ncclSum, root, comm);
}
SIMGPU_API ncclResult_t ncclReduce(const void* send, void* receive, size_t count,
                                   ncclDataType_t type, ncclRedOp_t operation, int root,
                                   ncclComm_t comm, cudaStream_t) {
  return add(__func__, kReduce, send, receive, count, type, operation, root, comm);
}
SIMGPU_API ncclResult_t ncclAllGather(const void* send, void* receive, size_t count,
                                      ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
  return add(__func__, kAllGather, send, receive, count, type, ncclSum, 0, comm);
}
SIMGPU_API ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count,
                                          ncclDataType_t type, ncclRedOp_t operation,
                                          ncclComm_t comm, cudaStream_t) {
  return add(__func__, kReduceScatter, send, receive, count, type, operation, 0, comm);
}

// ---- communicators ----

SIMGPU_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  return getrandom(id->internal, 16, 0) == 16 ? ncclSuccess : ncclSystemError;
}

SIMGPU_API ncclResult_t ncclCommInitAll(ncclComm_t* comms, int size, const int*) {
  static std::atomic<int> teams{0};
  const int team = ++teams;
  for (int rank = 0; rank < size; rank++) {
    comms[rank] = new ncclComm{rank, size, team, nullptr, nullptr};
  }
  return ncclSuccess;
}

SIMGPU_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id,
                                               int rank, ncclConfig_t*) {
  if (size > kMostRanks) return ncclInvalidArgument;
  uint64_t number[2];
  memcpy(number, id.internal, sizeof number);
  char path[64];
  snprintf(path, sizeof path, "/dev/shm/simgpu-%016lx%016lx", number[0], number[1]);
  const size_t length = sizeof(Shared) + size * kSlot;
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, length)) return ncclSystemError;
  void* start = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED) return ncclSystemError;
  Shared* shared = static_cast<Shared*>(start);
  shared->process[rank] = getpid();
  shared->present++;
  ncclResult_t result = ncclSuccess;
  char* slots = reinterpret_cast<char*>(shared + 1);
  *comm = new ncclComm{rank, size, 0, shared, slots};
  for (int turn = 0; shared->present < size && !result; turn++) {
    if (turn > 60000 || somebody_ended(**comm)) result = ncclRemoteError;
    usleep(1000);
  }
  unlink(path);
  return result;
}
SIMGPU_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm->shared) comm->shared->aborted = 1;  // those that wait for this rank stop
  return ncclSuccess;
}
SIMGPU_API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
SIMGPU_API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

// The watchdog of torch's process group asks for errors.
SIMGPU_API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

// torch's process group shows the allocator's memory to NCCL.
SIMGPU_API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
SIMGPU_API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

// It checks that they are what it asked for.
SIMGPU_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = comm->size;
  return ncclSuccess;
}
SIMGPU_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
