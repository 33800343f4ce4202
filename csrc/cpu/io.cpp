// Asynchronous transfers between memory and files: io_uring where the kernel allows it, threads elsewhere.
//
//     void* engine = threed_io_open(kind, fd, workers, depth, piece, &error);
//     int64_t id = threed_io_submit(engine, write, fd, memory, length, offset, block);
//     int64_t moved = threed_io_wait(engine, id);      // length, or -errno, or kShort; once for each id
//     threed_io_close(engine);
//
// A transfer is cut into pieces of `piece` bytes, `depth` of them under way in the ring, or one in each of `workers`
// threads. `block` is what the file's direct I/O aligns to, 1 for buffered files. Memory that is not aligned, and a tail
// shorter than a block, pass through an aligned copy in a thread; offsets must be aligned, and the file must have room
// for the whole last block. Every call's result is read: short transfers go on, interrupted ones begin again.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define THREED_RING 1
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#endif

namespace {

constexpr int64_t kShort = -5000;  // a read met the end of the file; below every -errno
constexpr int64_t kPage = 4096;
enum Kind { kAuto = 0, kRing = 1, kThreads = 2 };

struct Piece {
    int64_t request;
    bool write;
    int fd;
    char* memory;
    int64_t length, offset, block;
    int64_t moved = 0;

    bool straight() const {
        return reinterpret_cast<uintptr_t>(memory) % block == 0 && length % block == 0;
    }
};

// Takes in what one system call said: 0 to go on, else the piece's result.
int64_t advance(Piece& piece, int64_t count) {
    if (count == -EINTR || count == -EAGAIN) return 0;
    if (count < 0) return count;
    count -= count % piece.block;  // a direct transfer can go on only at a block
    if (count == 0) return piece.write ? -EIO : kShort;
    piece.moved += count;
    return piece.moved == piece.length ? piece.length : 0;
}

int64_t transfer(Piece piece) {
    int64_t result = 0;
    while (result == 0) {
        char* memory = piece.memory + piece.moved;
        int64_t left = piece.length - piece.moved, offset = piece.offset + piece.moved;
        int64_t count = piece.write ? pwrite(piece.fd, memory, left, offset) : pread(piece.fd, memory, left, offset);
        result = advance(piece, count < 0 ? -errno : count);
    }
    return result;
}

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};
using Aligned = std::unique_ptr<char, Free>;

Aligned aligned(int64_t length) {
    void* memory = nullptr;
    if (posix_memalign(&memory, length < (2 << 20) ? kPage : 2 << 20, length)) return nullptr;
#ifdef THREED_RING
    madvise(memory, length, MADV_HUGEPAGE);
#endif
    return Aligned(static_cast<char*>(memory));
}

// The piece by way of `copy`, padded with zeros to whole blocks.
int64_t transfer_copied(const Piece& piece, char* copy) {
    Piece padded = piece;
    padded.memory = copy;
    padded.length = (piece.length + piece.block - 1) / piece.block * piece.block;
    if (piece.write) {
        std::memcpy(copy, piece.memory, piece.length);
        std::memset(copy + piece.length, 0, padded.length - piece.length);
    }
    int64_t result = transfer(padded);
    if (result != padded.length) return result;
    if (!piece.write) std::memcpy(piece.memory, copy, piece.length);
    return piece.length;
}

#ifdef THREED_RING

// io_uring by raw system calls, as io_uring(7) and its headers describe it; all of it used by one thread.
class Ring {
public:
    ~Ring() {
        if (entries_) munmap(entries_, entries_bytes_);
        if (rings_) munmap(rings_, rings_bytes_);
        if (fd_ >= 0) close(fd_);
    }

    int open(unsigned entries) {
        constexpr unsigned kSingleIssuer = 1u << 12, kDeferTaskrun = 1u << 13;  // Linux 6.1: completions at enter() only
        io_uring_params params{};
        for (unsigned flags : {kSingleIssuer | kDeferTaskrun, 0u}) {
            params = {};
            params.flags = flags;
            fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
            if (fd_ >= 0 || errno != EINVAL) break;
        }
        if (fd_ < 0) return -errno;
        if (!(params.features & IORING_FEAT_SINGLE_MMAP)) return -ENOSYS;  // before Linux 5.4
        return map(params);
    }

    bool put(uint8_t operation, int fd, const void* memory, uint32_t length, uint64_t offset, uint64_t tag) {
        unsigned tail = *sq_tail_;
        if (tail - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE) > sq_mask_) return false;
        io_uring_sqe& entry = entries_[tail & sq_mask_];
        std::memset(&entry, 0, sizeof entry);
        entry.opcode = operation;
        entry.fd = fd;
        entry.addr = reinterpret_cast<uint64_t>(memory);
        entry.len = length;
        entry.off = offset;
        entry.user_data = tag;
        if (operation == IORING_OP_POLL_ADD) entry.poll_events = POLLIN;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
        return true;
    }

    // Submits what was put and waits until something has completed; 0 or -errno.
    int enter() {
        unsigned unsubmitted = *sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
        long said = syscall(__NR_io_uring_enter, fd_, unsubmitted, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
        return said < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY ? -errno : 0;
    }

    template <typename Seen>
    void reap(Seen seen) {
        unsigned head = *cq_head_;
        for (; head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); ++head) {
            const io_uring_cqe& entry = completions_[head & cq_mask_];
            seen(entry.user_data, entry.res);
        }
        __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    }

    // Whether it moves bytes: a NOP, then a read of the file's first page. 0 or -errno.
    int probe(int file) {
        Aligned page = aligned(kPage);
        if (!page) return -ENOMEM;
        for (bool read : {false, true}) {
            put(read ? IORING_OP_READ : IORING_OP_NOP, read ? file : -1, read ? page.get() : nullptr, read ? kPage : 0, 0, 0);
            int said = 0, result = 1;
            while (said == 0 && result == 1) {
                said = enter();
                reap([&](uint64_t, int value) { result = value; });
            }
            if (said < 0 || result < 0) return said < 0 ? said : result;
            if (result != (read ? kPage : 0)) return -EIO;
        }
        return 0;
    }

private:
    int map(const io_uring_params& params) {
        size_t submissions = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        rings_bytes_ = submissions > completions ? submissions : completions;
        entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
        constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_SHARED | MAP_POPULATE;
        void* rings = mmap(nullptr, rings_bytes_, kProtection, kFlags, fd_, IORING_OFF_SQ_RING);
        if (rings == MAP_FAILED) return -errno;
        rings_ = static_cast<char*>(rings);
        void* entries = mmap(nullptr, entries_bytes_, kProtection, kFlags, fd_, IORING_OFF_SQES);
        if (entries == MAP_FAILED) return -errno;
        entries_ = static_cast<io_uring_sqe*>(entries);
        auto at = [this](uint32_t offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
        sq_head_ = at(params.sq_off.head), sq_tail_ = at(params.sq_off.tail), sq_array_ = at(params.sq_off.array);
        cq_head_ = at(params.cq_off.head), cq_tail_ = at(params.cq_off.tail);
        sq_mask_ = *at(params.sq_off.ring_mask), cq_mask_ = *at(params.cq_off.ring_mask);
        completions_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
        return 0;
    }

    int fd_ = -1;
    char* rings_ = nullptr;
    io_uring_sqe* entries_ = nullptr;
    io_uring_cqe* completions_ = nullptr;
    size_t rings_bytes_ = 0, entries_bytes_ = 0;
    unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
};

#endif

class Engine {
public:
    Engine(int workers, int depth, int64_t piece) : workers_(workers), depth_(depth), piece_(piece) {}

    ~Engine() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        work_.notify_all();
        wake_ring();
        for (std::thread& thread : threads_) thread.join();
#ifdef THREED_RING
        if (wakeup_ >= 0) close(wakeup_);
#endif
    }

    // Starts the ring on a thread of its own; -errno where the kernel does not allow it.
    int start_ring(int file) {
#ifdef THREED_RING
        wakeup_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wakeup_ < 0) return -errno;
        std::promise<int> promise;
        std::future<int> started = promise.get_future();
        threads_.emplace_back(&Engine::run_ring, this, file, std::move(promise));
        int said = started.get();
        std::lock_guard<std::mutex> lock(mutex_);
        ring_ = said == 0;
        return said;
#else
        (void)file;
        return -ENOSYS;
#endif
    }

    bool has_ring() const { return ring_; }

    int64_t submit(bool write, int fd, char* memory, int64_t length, int64_t offset, int64_t block) {
        if (length <= 0 || block <= 0 || offset % block || piece_ % block) return -EINVAL;
        std::list<Piece> straight, copied;  // spliced below, which cannot fail half-way
        std::lock_guard<std::mutex> lock(mutex_);
        int64_t whole = length / block * block;
        for (int64_t at = 0; at < length;) {
            int64_t size = at < whole ? std::min(piece_, whole - at) : length - at;
            Piece piece{0, write, fd, memory + at, size, offset + at, block};
            (ring_ && piece.straight() ? straight : copied).push_back(piece);
            at += size;
        }
        if (!copied.empty()) start_workers();
        int64_t id = ++last_;
        requests_[id].pieces = static_cast<int64_t>(straight.size() + copied.size());
        for (Piece& piece : straight) piece.request = id;
        for (Piece& piece : copied) piece.request = id;
        if (!straight.empty()) wake_ring();
        for_ring_.splice(for_ring_.end(), straight);
        for_workers_.splice(for_workers_.end(), copied);
        work_.notify_all();
        return id;
    }

    int64_t wait(int64_t id) {
        std::unique_lock<std::mutex> lock(mutex_);
        auto found = requests_.find(id);
        if (found == requests_.end()) return -EINVAL;
        Request& request = found->second;  // stays where it is, unlike the iterator; no one else waits for it
        finished_.wait(lock, [&] { return request.pieces == 0; });
        int64_t result = request.error ? request.error : request.moved;
        requests_.erase(id);
        return result;
    }

    bool done(int64_t id) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = requests_.find(id);
        return found == requests_.end() || found->second.pieces == 0;
    }

private:
    struct Request {
        int64_t pieces = 0, moved = 0, error = 0;
    };

    // The next piece worth moving; those of a request that has failed are settled here. Needs the mutex.
    bool next(std::list<Piece>& queue, Piece& piece) {
        while (!queue.empty()) {
            piece = queue.front();
            queue.pop_front();
            Request& request = requests_[piece.request];
            if (request.error == 0) return true;
            settle(piece, request.error);
        }
        return false;
    }

    // Needs the mutex.
    void settle(const Piece& piece, int64_t result) {
        Request& request = requests_[piece.request];
        if (result < 0 && request.error == 0) request.error = result;
        if (result > 0) request.moved += result;
        if (--request.pieces == 0) finished_.notify_all();
    }

    // Needs the mutex.
    void start_workers() {
        while (running_ < workers_) {
            try {
                threads_.emplace_back([this] { run_worker(); });
            } catch (const std::system_error&) {
                if (running_ == 0) throw;
                return;
            }
            ++running_;
        }
    }

    void run_worker() {
        Aligned copy;  // a piece long, made when first needed
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            work_.wait(lock, [this] { return stopping_ || !for_workers_.empty(); });
            Piece piece;
            if (!next(for_workers_, piece)) {
                if (stopping_) return;
                continue;
            }
            lock.unlock();
            int64_t result = -ENOMEM;
            if (piece.straight()) {
                result = transfer(piece);
            } else if (copy || (copy = aligned(piece_))) {
                result = transfer_copied(piece, copy.get());
            }
            lock.lock();
            settle(piece, result);
        }
    }

    void wake_ring() {
#ifdef THREED_RING
        if (wakeup_ >= 0) eventfd_write(wakeup_, 1);
#endif
    }

#ifdef THREED_RING
    static constexpr uint64_t kWakeup = ~0ull;

    void run_ring(int file, std::promise<int> started) {
        Ring ring;
        int said = ring.open(depth_ + 1);  // and one for the wake-up call
        if (said == 0) said = ring.probe(file);
        started.set_value(said);
        if (said < 0) return;
        std::vector<Piece> under_way(depth_);
        std::vector<int> free;
        for (int slot = 0; slot < depth_; ++slot) free.push_back(slot);
        bool listening = false;
        while (feed(ring, under_way, free)) {
            if (!listening) listening = ring.put(IORING_OP_POLL_ADD, wakeup_, nullptr, 0, 0, kWakeup);
            said = ring.enter();
            if (said < 0) return give_up(under_way, free, said);
            ring.reap([&](uint64_t tag, int count) {
                if (tag == kWakeup) {
                    eventfd_t calls;
                    eventfd_read(wakeup_, &calls);
                    listening = false;  // a poll tells once
                    return;
                }
                Piece& piece = under_way[tag];
                int64_t result = advance(piece, count);
                std::lock_guard<std::mutex> lock(mutex_);
                if (result == 0) for_ring_.push_front(piece);
                else settle(piece, result);
                free.push_back(static_cast<int>(tag));
            });
        }
    }

    // Puts queued pieces into free slots; whether there is anything left to live for.
    bool feed(Ring& ring, std::vector<Piece>& under_way, std::vector<int>& free) {
        std::lock_guard<std::mutex> lock(mutex_);
        Piece piece;
        while (!free.empty() && next(for_ring_, piece)) {
            int slot = free.back();
            under_way[slot] = piece;
            free.pop_back();
            ring.put(piece.write ? IORING_OP_WRITE : IORING_OP_READ, piece.fd, piece.memory + piece.moved,
                     static_cast<uint32_t>(piece.length - piece.moved), piece.offset + piece.moved, slot);
        }
        return !stopping_ || free.size() < under_way.size();
    }

    // The ring itself failed: what is in it has failed, what is not goes to the workers.
    void give_up(const std::vector<Piece>& under_way, const std::vector<int>& free, int64_t said) {
        std::lock_guard<std::mutex> lock(mutex_);
        ring_ = false;
        std::vector<bool> idle(under_way.size());
        for (int slot : free) idle[slot] = true;
        for (size_t slot = 0; slot < idle.size(); ++slot)
            if (!idle[slot]) settle(under_way[slot], said);
        for_workers_.splice(for_workers_.end(), for_ring_);
        start_workers();
        work_.notify_all();
    }

    int wakeup_ = -1;
#endif

    const int workers_, depth_;
    const int64_t piece_;
    std::mutex mutex_;  // guards all below
    std::condition_variable work_, finished_;
    std::list<Piece> for_ring_, for_workers_;
    std::unordered_map<int64_t, Request> requests_;
    std::list<std::thread> threads_;
    int64_t last_ = 0;
    int running_ = 0;
    bool stopping_ = false;
    std::atomic<bool> ring_{false};  // read without the mutex too
};

// Runs `body`; an exception becomes an error code.
template <typename Body>
int64_t guarded(Body body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    } catch (...) {
        return -EAGAIN;  // std::thread: no more threads for this process
    }
}

}  // namespace

extern "C" {

// kind: 0 io_uring if the kernel allows it, else threads; 1 io_uring; 2 threads. `fd`: a file to try io_uring on, at
// least a page long. Null, and -errno in `error`, when it cannot be had.
void* threed_io_open(int kind, int fd, int workers, int depth, int64_t piece, int* error) {
    Engine* engine = nullptr;
    *error = static_cast<int>(guarded([&]() -> int64_t {
        if (workers <= 0 || depth <= 0 || piece <= 0 || piece % kPage || piece > (1 << 30)) return -EINVAL;
        auto made = std::make_unique<Engine>(workers, depth, piece);
        int said = kind == kThreads ? 0 : made->start_ring(fd);
        if (kind == kRing && said < 0) return said;
        engine = made.release();
        return 0;
    }));
    return engine;
}

int threed_io_has_ring(void* engine) { return static_cast<Engine*>(engine)->has_ring(); }

int64_t threed_io_submit(void* engine, int write, int fd, void* memory, int64_t length, int64_t offset, int64_t block) {
    return guarded([&] {
        return static_cast<Engine*>(engine)->submit(write, fd, static_cast<char*>(memory), length, offset, block);
    });
}

int64_t threed_io_wait(void* engine, int64_t id) {
    return guarded([&] { return static_cast<Engine*>(engine)->wait(id); });
}

int threed_io_done(void* engine, int64_t id) {
    return static_cast<int>(guarded([&]() -> int64_t { return static_cast<Engine*>(engine)->done(id); }));
}

void threed_io_close(void* engine) { delete static_cast<Engine*>(engine); }

}  // extern "C"
