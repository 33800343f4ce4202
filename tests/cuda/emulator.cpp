// Runs the blocks of a CUDA kernel on the CPU, one after the other, and checks every access that the kernel makes.
//
//   threads    Each is a fiber with a stack of its own. They take turns only where they wait for one another, in random
//              order, first to last, or last to first: so every order of warps, and of lanes in a warp, can come.
//   accesses   g++ -fsanitize=thread puts a call before each load and store that others might see (__tsan_write4 ...).
//              Those calls are answered here instead of in libtsan.
//   memory     For each byte: whether it was written, who wrote it last, and who has read it since. So found are accesses
//              outside of what was handed over, reads of what nobody wrote, and races.
//
// Two accesses of a byte, one of them a write, race unless the second knows of the first: they are of one thread; or of one
// block, with a barrier of the block between them; or of one warp, with __syncwarp between them, directly or by way of other
// lanes. Shuffles and votes order no memory. Nothing orders the blocks of a launch.
//
// Counted are the bytes that a kernel reads and writes of each buffer, the 32-byte sectors that a warp touches at once, and
// the passes that shared memory takes for the words that a warp asks for at once.
//
// The first fault ends the launch. Compile this file without -fsanitize.

#define EMULATOR_ITSELF
#include "cuda_runtime.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace emulator {
namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint32_t NOBODY = ~0u, SEVERAL = ~0u - 1;
constexpr size_t SHARED_WITHOUT_ASKING = 48 << 10;

// The last write of a byte, or its readers since: lanes of one warp; or several warps, or several blocks.
struct Mark {
  uint32_t block = NOBODY, warp = 0, lanes = 0;
  uint32_t epoch = 0;  // barriers of the block before it
  uint32_t meeting = 0;  // barriers of the warp before the latest of these accesses
  uint32_t instruction = 0;
};

struct Byte {
  Mark write, read;
  bool written = false;
};

struct Region {
  enum Kind { BUFFER, SHARED, ARGUMENTS };

  Kind kind;
  char* first;
  size_t size;
  bool known;  // all of it was written before the launch
  std::string name;
  std::vector<Byte> bytes{};
  int64_t read = 0, written = 0;
  size_t used_from = size, used_to = 0;  // of shared memory: what this block has accessed
};

enum State { READY, AT_BARRIER, AT_MEETING, ENDED };

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  State state = ENDED;
  uint3 index{};
  unsigned number = 0;
  uint32_t knows[32]{};  // of each lane of the warp: its accesses before this barrier of the warp
  Meeting meeting{};
  unsigned mask = 0;
  Line line{};
  int from = 0;  // lane that it reads
  uint64_t value = 0, received = 0;

  unsigned warp() const { return number / 32; }
  unsigned lane() const { return number % 32; }
};

// One lane's part of what a warp asks for at once: the same instruction, the same time round.
struct Request {
  uint32_t instruction, warp, round;
  bool shared;
  uint64_t address;
  uint32_t size;
};

struct Counts {
  int64_t sectors, bytes_in_sectors, bank_passes, least_bank_passes, barriers, meetings, kernels;
};

// A shared library's own memory: constants and code, then what is zeroed, which is the kernels' shared memory.
struct Module {
  const char *first, *zeroed, *last;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Fiber*> turn;  // those that go next
  Fiber* running = nullptr;
  void* host_stack_pointer = nullptr;
  void (*body)(const void*) = nullptr;
  const void* arguments = nullptr;
  dim3 grid, block;
  uint3 block_index{};
  uint32_t block_number = 0, epoch = 0;
  std::vector<uint32_t> meetings;  // of each warp
  std::unique_ptr<uint4[]> dynamic_shared;

  std::vector<Region> regions;
  std::vector<Module> modules;
  Module module{};  // whose kernel runs
  std::map<const void*, size_t> allowed_shared;
  size_t largest_shared = 0;  // that a block may ask for
  int last_error = cudaSuccess, driver_error = cudaSuccess;
  std::unordered_map<const void*, uint32_t> numbers;  // of instructions
  std::vector<const void*> instructions;

  enum Order { RANDOM, FORWARD, BACKWARD } order = RANDOM;
  std::mt19937 random{1};
  bool checks = true;
  uint32_t traced_blocks = 0;
  std::vector<Request> requests;
  std::vector<std::vector<uint32_t>> rounds;  // of each instruction and thread; empty where it has not run
  std::vector<Byte> unused_bytes;  // marks of a module's shared memory, which the next launch reuses
  Counts counts{};
  std::string error;
};

Machine& machine = *new Machine;

// ------------------------------------------------------------------------------------------------------------- fibers

extern "C" void switch_stacks(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.globl switch_stacks
.type switch_stacks, @function
switch_stacks:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size switch_stacks, .-switch_stacks
)");
constexpr int FRAME_WORDS = 8, RETURN_WORD = 6;  // six registers, where to return to, and a word for alignment
#elif defined(__aarch64__)
asm(R"(
.globl switch_stacks
.type switch_stacks, %function
switch_stacks:
  stp x29, x30, [sp, #-160]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x29, x30, [sp], #160
  ret
.size switch_stacks, .-switch_stacks
)");
constexpr int FRAME_WORDS = 20, RETURN_WORD = 1;
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

void to_host() { switch_stacks(&machine.running->stack_pointer, machine.host_stack_pointer); }

void fiber_main() {
  machine.body(machine.arguments);
  machine.running->state = ENDED;
  to_host();
}

// Has a fiber begin at `fiber_main` when it is next switched to. Fibers that a fault left halfway own nothing.
void prepare(Fiber& fiber, unsigned number) {
  if (!fiber.stack)
    fiber.stack = static_cast<char*>(
        mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const dim3& block = machine.block;
  fiber.index = {number % block.x, number / block.x % block.y, number / block.x / block.y};
  fiber.number = number;
  fiber.state = READY;
  std::fill(std::begin(fiber.knows), std::end(fiber.knows), 0);
  void** const frame = reinterpret_cast<void**>(fiber.stack + STACK_BYTES) - FRAME_WORDS;
  std::fill(frame, frame + FRAME_WORDS, nullptr);
  frame[RETURN_WORD] = reinterpret_cast<void*>(fiber_main);
  fiber.stack_pointer = frame;
}

// ------------------------------------------------------------------------------------------------------------- faults

void fail(const std::string& text) {
  if (machine.error.empty()) machine.error = text;
  if (machine.running) to_host();
}

std::string place(uint32_t instruction) {
  const char* at = static_cast<const char*>(machine.instructions[instruction]);
  Dl_info info;
  char text[400] = "?";
  if (at && dladdr(at, &info))  // the offset of the call itself, for addr2line
    std::snprintf(text, sizeof text, "<%s+0x%lx>", info.dli_fname, long(at - 1 - static_cast<const char*>(info.dli_fbase)));
  return text;
}

std::string thread_name(const Fiber& fiber) {
  return "block " + std::to_string(machine.block_number) + " thread " + std::to_string(fiber.number);
}

std::string name_of(const Mark& mark) {
  if (mark.block == SEVERAL) return "several blocks";
  std::string text = "block " + std::to_string(mark.block);
  if (mark.warp == SEVERAL) return text + ", several warps";
  if (mark.lanes & (mark.lanes - 1)) return text + ", lanes of warp " + std::to_string(mark.warp);
  return text + " thread " + std::to_string(32 * mark.warp + unsigned(__builtin_ctz(mark.lanes)));
}

void race(const Region& region, size_t at, const Mark& before, bool wrote, bool writes, uint32_t instruction) {
  fail("race: " + thread_name(*machine.running) + (writes ? " writes " : " reads ") + region.name + "[" +
       std::to_string(at) + "] " + place(instruction) + ", which " + name_of(before) + (wrote ? " wrote " : " read ") +
       place(before.instruction) + ", and no barrier lies between");
}

// ----------------------------------------------------------------------------------------------------------- accesses

// The lanes of `mark` whose accesses `fiber` does not know of; its own are none of them.
uint32_t unknown_lanes(const Mark& mark, const Fiber& fiber) {
  uint32_t unknown = 0;
  for (uint32_t rest = mark.lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (unsigned(lane) != fiber.lane() && mark.meeting >= fiber.knows[lane]) unknown |= 1u << lane;
  }
  return unknown;
}

bool ordered(const Mark& mark, const Fiber& fiber) {
  if (mark.block == NOBODY) return true;
  if (mark.block != machine.block_number) return false;
  if (mark.epoch != machine.epoch) return true;
  return mark.warp == fiber.warp() && !unknown_lanes(mark, fiber);
}

// The readers of a byte that a later write must know of: whoever knows of this one knows of those that it replaces.
void add_reader(Mark& mark, const Mark& mine, const Fiber& fiber) {
  const Mark before = mark;
  mark = mine;
  if (before.block == NOBODY || ordered(before, fiber)) return;
  if (before.block != mine.block) {
    mark.block = SEVERAL;
  } else if (before.warp != mine.warp) {
    mark.warp = SEVERAL;
  } else {
    mark.lanes |= unknown_lanes(before, fiber);
  }
}

Region* region_of(const char* address) {
  for (Region& region : machine.regions)
    if (address >= region.first && address < region.first + region.size) return &region;
  return nullptr;
}

uint32_t number_of(const void* instruction) {
  const auto [entry, fresh] = machine.numbers.try_emplace(instruction, uint32_t(machine.instructions.size()));
  if (fresh) machine.instructions.push_back(instruction);
  return entry->second;
}

void count(Region& region, const Fiber& fiber, const char* address, size_t size, bool write, uint32_t instruction) {
  (write ? region.written : region.read) += int64_t(size);
  if (machine.block_number >= machine.traced_blocks) return;
  if (machine.rounds.size() <= instruction) machine.rounds.resize(instruction + 1);
  std::vector<uint32_t>& rounds = machine.rounds[instruction];
  if (rounds.empty()) rounds.resize(machine.fibers.size());
  const uint32_t round = rounds[fiber.number]++;
  machine.requests.push_back({instruction, fiber.warp(), round, region.kind == Region::SHARED,
                              reinterpret_cast<uint64_t>(address), uint32_t(size)});
}

// The numbers of units of `unit` bytes that a warp's requests touch, without repetition.
std::vector<uint64_t> units(const std::vector<Request>& requests, size_t first, size_t last, uint64_t unit) {
  std::vector<uint64_t> found;
  for (size_t i = first; i < last; i++)
    for (uint64_t at = requests[i].address / unit; at <= (requests[i].address + requests[i].size - 1) / unit; at++)
      found.push_back(at);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

// Whether several lanes ask for the same number. Such a sector is not counted: it stays in a cache, for the warps and rows
// that need the rest of it.
bool one_address(const std::vector<Request>& requests, size_t first, size_t last) {
  const auto same = [&](const Request& r) { return r.address == requests[first].address; };
  return last - first > 1 && std::all_of(requests.begin() + long(first), requests.begin() + long(last), same);
}

// Adds up what the warps of the block that ended asked for.
void count_requests() {
  std::vector<Request>& all = machine.requests;
  if (all.empty()) return;
  const auto key = [](const Request& r) { return std::make_tuple(r.instruction, r.warp, r.round); };
  std::sort(all.begin(), all.end(), [&](const Request& a, const Request& b) { return key(a) < key(b); });
  for (size_t first = 0, last = 0; first < all.size(); first = last) {
    while (last < all.size() && key(all[last]) == key(all[first])) last++;
    if (all[first].shared) {
      // Words of one bank take a pass each; a pass has a word of each of the 32 banks.
      const std::vector<uint64_t> words = units(all, first, last, 4);
      int64_t most = 0, of_bank[32] = {};
      for (uint64_t word : words) most = std::max(most, ++of_bank[word % 32]);
      machine.counts.bank_passes += most;
      machine.counts.least_bank_passes += int64_t(words.size() + 31) / 32;
    } else if (!one_address(all, first, last)) {
      machine.counts.sectors += int64_t(units(all, first, last, 32).size());
      machine.counts.bytes_in_sectors += int64_t(units(all, first, last, 1).size());
    }
  }
  all.clear();
  for (std::vector<uint32_t>& rounds : machine.rounds) rounds.clear();
}

// -------------------------------------------------------------------------------------------------------------- waits

// Lets threads that wait for their block go on when all that have not ended are there.
// False when the block has ended, or can never go on.
bool pass_barrier() {
  size_t waiting = 0, alive = 0;
  const Fiber* first = nullptr;
  for (const Fiber& fiber : machine.fibers) {
    alive += fiber.state != ENDED;
    if (fiber.state == AT_MEETING)
      fail("line " + std::to_string(fiber.line.number) + ": " + thread_name(fiber) + " waits for lanes that never come");
    if (fiber.state != AT_BARRIER) continue;
    waiting++;
    if (!first) first = &fiber;
    if (fiber.line.number != first->line.number || std::strcmp(fiber.line.file, first->line.file))
      fail("divergent barrier: threads of a block wait at line " + std::to_string(first->line.number) + " and at line " +
           std::to_string(fiber.line.number));
  }
  if (!alive || !machine.error.empty()) return false;
  if (waiting != alive) {
    fail("the barrier at line " + std::to_string(first->line.number) + " is reached by " + std::to_string(waiting) + " of " +
         std::to_string(alive) + " threads");
    return false;
  }
  for (Fiber& fiber : machine.fibers)
    if (fiber.state == AT_BARRIER) fiber.state = READY;
  machine.epoch++;
  machine.counts.barriers++;
  return true;
}

// All lanes of a mask have come: hands the values around, and lets them go on.
void pass_meeting(unsigned base, unsigned mask, Meeting kind) {
  Fiber* const lanes = machine.fibers.data() + base;
  uint32_t known[32] = {};
  uint64_t votes = 0;
  for (unsigned i = 0; i < 32; i++)
    if (mask >> i & 1) votes |= uint64_t(lanes[i].value != 0) << i;
  if (kind == WARP_BARRIER) {
    const uint32_t time = ++machine.meetings[base / 32];
    for (unsigned i = 0; i < 32; i++) {
      if (!(mask >> i & 1)) continue;
      for (unsigned k = 0; k < 32; k++) known[k] = std::max(known[k], lanes[i].knows[k]);
    }
    for (unsigned i = 0; i < 32; i++)
      if (mask >> i & 1) known[i] = time;
  }
  for (unsigned i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    lanes[i].received = kind == SHUFFLE ? lanes[lanes[i].from].value : votes;
    if (kind == WARP_BARRIER) std::copy(known, known + 32, lanes[i].knows);
    lanes[i].state = READY;
    machine.turn.push_back(&lanes[i]);
  }
  machine.counts.meetings++;
}

void run_block() {
  std::vector<Fiber*>& turn = machine.turn;
  do {
    turn.clear();
    for (Fiber& fiber : machine.fibers)
      if (fiber.state == READY) turn.push_back(&fiber);
    if (machine.order == Machine::BACKWARD) std::reverse(turn.begin(), turn.end());
    for (size_t i = 0; i < turn.size() && machine.error.empty(); i++) {  // those that met meanwhile join the end
      if (machine.order == Machine::RANDOM) std::swap(turn[i], turn[i + machine.random() % (turn.size() - i)]);
      machine.running = turn[i];
      switch_stacks(&machine.host_stack_pointer, machine.running->stack_pointer);
      machine.running = nullptr;
    }
  } while (machine.error.empty() && pass_barrier());
}

// ------------------------------------------------------------------------------------------------------------- launch

// What is wrong with a launch; 0 where nothing is.
cudaError_t refused(const Configuration& c, const void* kernel) {
  if (machine.driver_error) return machine.driver_error;
  const auto product = [](dim3 d) { return uint64_t(d.x) * d.y * d.z; };
  const uint64_t threads = product(c.block);
  if (!threads || threads > 1024 || c.block.z > 64 || !product(c.grid)) return cudaErrorInvalidConfiguration;
  if (c.grid.x > 0x7fffffffu || c.grid.y > 65535 || c.grid.z > 65535) return cudaErrorInvalidConfiguration;
  const auto allowed = machine.allowed_shared.find(kernel);
  const size_t most = allowed == machine.allowed_shared.end() ? 0 : std::min(allowed->second, machine.largest_shared);
  return c.shared > std::max(SHARED_WITHOUT_ASKING, most) ? cudaErrorInvalidValue : cudaSuccess;
}

// Marks shared memory as not written. Only the range of checked accesses is cleared: reads outside of it are refused anyway.
void forget_accesses(Region& region) {
  if (!machine.checks) std::memset(region.first, 0xff, region.size);
  if (region.used_from >= region.used_to) return;
  std::memset(region.first + region.used_from, 0xff, region.used_to - region.used_from);
  std::fill(region.bytes.begin() + long(region.used_from), region.bytes.begin() + long(region.used_to), Byte());
  region.used_from = region.size, region.used_to = 0;
}

void begin_block(uint64_t number) {
  const dim3& grid = machine.grid;
  machine.block_index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
  machine.block_number = uint32_t(number);
  machine.epoch = 0;
  machine.meetings.assign((machine.fibers.size() + 31) / 32, 0);
  for (Region& region : machine.regions) {
    if (region.kind == Region::SHARED) forget_accesses(region);
  }
  for (unsigned thread = 0; thread < machine.fibers.size(); thread++) prepare(machine.fibers[thread], thread);
}

}  // namespace

uint3 thread_index() { return machine.running->index; }
uint3 block_index() { return machine.block_index; }
dim3 block_size() { return machine.block; }
dim3 grid_size() { return machine.grid; }
void* dynamic_shared_memory() { return machine.dynamic_shared.get(); }

void wait_for_block(Line line) {
  machine.running->line = line;
  machine.running->state = AT_BARRIER;
  to_host();
}

uint64_t meet(Meeting kind, unsigned mask, uint64_t value, int from, Line line) {
  Fiber& me = *machine.running;
  const unsigned base = me.number / 32 * 32;
  const auto refuse = [&](const std::string& text) { fail("line " + std::to_string(line.number) + ": " + text); };
  if (!(mask >> me.lane() & 1)) refuse(thread_name(me) + " is not in the mask that it names");
  if (kind == SHUFFLE && (from < 0 || from > 31 || !(mask >> from & 1)))
    refuse(thread_name(me) + " reads from lane " + std::to_string(from) + ", which is not in the mask");
  if (base + 31 - unsigned(__builtin_clz(mask)) >= machine.fibers.size()) refuse("the mask names lanes beyond the block");
  me.meeting = kind, me.mask = mask, me.value = value, me.from = from, me.line = line, me.state = AT_MEETING;
  bool all = true;
  for (unsigned k = 1; all && k < 32; k++) {  // the next lane first: it comes last, or next
    const unsigned i = (me.lane() + k) % 32;
    if (!(mask >> i & 1)) continue;
    const Fiber& other = machine.fibers[base + i];
    // A lane that waits elsewhere may come later; if it never does, `pass_barrier` says so.
    all = other.state == AT_MEETING && other.mask == mask && other.meeting == kind && other.line.number == line.number;
  }
  if (all) pass_meeting(base, mask, kind);
  to_host();
  return me.received;
}

void access(const void* to, size_t size, bool write, const void* from) {
  Fiber* const fiber = machine.running;
  if (!fiber || !machine.checks) return;
  char* const address = static_cast<char*>(const_cast<void*>(to));
  if (address >= fiber->stack && address < fiber->stack + STACK_BYTES) return;
  Region* const region = region_of(address);
  if (!region && !write && address >= machine.module.first && address < machine.module.zeroed) return;  // a constant
  const uint32_t instruction = number_of(from);
  if (!region || address + size > region->first + region->size || (write && region->kind == Region::ARGUMENTS))
    return fail("out of bounds: " + thread_name(*fiber) + (write ? " writes " : " reads ") + std::to_string(size) +
                " bytes at " + (region ? region->name + "[" + std::to_string(address - region->first) + "] of " +
                std::to_string(region->size) : "memory that it was not given") + " " + place(instruction));
  if (size <= 16 && reinterpret_cast<uintptr_t>(address) % size)
    return fail("misaligned: " + thread_name(*fiber) + " accesses " + std::to_string(size) + " bytes at " + region->name +
                "[" + std::to_string(address - region->first) + "] " + place(instruction));
  if (region->kind == Region::ARGUMENTS) return;
  count(*region, *fiber, address, size, write, instruction);
  const Mark mine{machine.block_number, fiber->warp(), 1u << fiber->lane(), machine.epoch,
                  machine.meetings[fiber->warp()], instruction};
  const size_t first = size_t(address - region->first);
  region->used_from = std::min(region->used_from, first), region->used_to = std::max(region->used_to, first + size);
  for (size_t at = first; at < first + size; at++) {
    Byte& byte = region->bytes[at];
    if (!ordered(byte.write, *fiber)) return race(*region, at, byte.write, true, write, instruction);
    if (write && !ordered(byte.read, *fiber)) return race(*region, at, byte.read, false, write, instruction);
    if (!write && !byte.written && !region->known)
      return fail("unwritten: " + thread_name(*fiber) + " reads " + region->name + "[" + std::to_string(at) +
                  "], which nobody wrote " + place(instruction));
    if (write) {
      byte.write = mine, byte.read = Mark(), byte.written = true;
    } else {
      add_reader(byte.read, mine, *fiber);
    }
  }
}

int& last_error() { return machine.last_error; }

int allow_shared(const void* kernel, size_t bytes) {
  if (bytes > machine.largest_shared) return cudaErrorInvalidValue;
  machine.allowed_shared[kernel] = bytes;
  return cudaSuccess;
}

void add_module(const char* first, const char* zeroed, const char* last) {
  machine.modules.push_back({first, zeroed, last});
}

int run(const void* kernel, const Configuration& c, void (*body)(const void*), const void* arguments, size_t bytes) {
  if (!machine.error.empty()) return 999;
  if (const cudaError_t error = refused(c, kernel)) return error;
  machine.counts.kernels++;
  machine.grid = c.grid, machine.block = c.block, machine.body = body, machine.arguments = arguments;
  for (const Module& module : machine.modules)
    if (kernel >= module.first && kernel < module.last) machine.module = module;
  machine.fibers.resize(size_t(c.block.x) * c.block.y * c.block.z);
  machine.dynamic_shared.reset(new uint4[c.shared / 16 + 1]);
  const size_t buffers = machine.regions.size();
  const auto add = [](Region::Kind kind, const void* first, size_t size, const char* name) {
    if (size) machine.regions.push_back({kind, static_cast<char*>(const_cast<void*>(first)), size, kind != Region::SHARED, name});
  };
  add(Region::SHARED, machine.dynamic_shared.get(), c.shared, "dynamic shared memory");
  add(Region::SHARED, machine.module.zeroed, size_t(machine.module.last - machine.module.zeroed), "shared memory");
  add(Region::ARGUMENTS, arguments, bytes, "the arguments");
  for (Region& region : machine.regions) {
    if (region.kind != Region::SHARED) continue;
    std::memset(region.first, 0xff, region.size);
    if (region.first == machine.module.zeroed) region.bytes.swap(machine.unused_bytes);
    if (machine.checks) region.bytes.resize(region.size);
  }
  const uint64_t blocks = uint64_t(c.grid.x) * c.grid.y * c.grid.z;
  for (uint64_t number = 0; number < blocks && machine.error.empty(); number++) {
    begin_block(number);
    run_block();
    count_requests();
  }
  for (Region& region : machine.regions) {
    if (region.kind != Region::SHARED) continue;
    forget_accesses(region);
    if (region.first == machine.module.zeroed) region.bytes.swap(machine.unused_bytes);
  }
  machine.regions.resize(buffers);
  for (Region& region : machine.regions)  // the next launch comes after this one
    for (Byte& byte : region.bytes) byte.write = byte.read = Mark();
  return machine.error.empty() ? cudaSuccess : 999;
}

}  // namespace emulator

// ------------------------------------------------------------------------------- what tests/cuda/emulator.py calls

extern "C" {

// Begins anew. order: 0 random, 1 first thread to last, 2 last to first. checks: 0 only runs. traced_blocks: of each
// launch, whose sectors and bank passes are counted. largest_shared: bytes of shared memory that a block may ask for.
// driver_error: with which every launch is refused.
void emulator_begin(unsigned seed, int order, int checks, int traced_blocks, int largest_shared, int driver_error) {
  using emulator::machine;
  machine.regions.clear();
  machine.error.clear();
  machine.random.seed(seed);
  machine.order = emulator::Machine::Order(order);
  machine.checks = checks != 0;
  machine.traced_blocks = uint32_t(traced_blocks);
  machine.counts = {};
  machine.allowed_shared.clear();
  machine.largest_shared = size_t(largest_shared);
  machine.last_error = cudaSuccess;
  machine.driver_error = driver_error;
}

// Hands memory over to kernels; returns its number. known: it holds values that a kernel may read.
int emulator_buffer(void* first, size_t size, int known, const char* name) {
  using emulator::Region;
  Region region{Region::BUFFER, static_cast<char*>(first), size, known != 0, name};
  if (emulator::machine.checks) region.bytes.resize(size);
  emulator::machine.regions.push_back(std::move(region));
  return int(emulator::machine.regions.size()) - 1;
}

// Takes all buffers back.
void emulator_forget() { emulator::machine.regions.clear(); }

// What is wrong; empty while nothing is.
const char* emulator_error() { return emulator::machine.error.c_str(); }

// Bytes that were read and written of a buffer.
void emulator_traffic(int buffer, int64_t* out) {
  out[0] = emulator::machine.regions[size_t(buffer)].read;
  out[1] = emulator::machine.regions[size_t(buffer)].written;
}

// sectors, bytes used in them, bank passes, the least that would do, block barriers, meetings of lanes
void emulator_counts(int64_t* out) { std::memcpy(out, &emulator::machine.counts, sizeof emulator::machine.counts); }

#define ACCESS(name, size, write) \
  void __tsan_##name(void* address) { emulator::access(address, size, write, __builtin_return_address(0)); }
#define ACCESSES(size)              \
  ACCESS(read##size, size, false)   \
  ACCESS(write##size, size, true)   \
  ACCESS(unaligned_read##size, size, false) \
  ACCESS(unaligned_write##size, size, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* at, size_t size) { emulator::access(at, size, false, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t size) { emulator::access(at, size, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

}  // extern "C"
