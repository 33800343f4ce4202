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

#include "io_ring.h"

namespace {

constexpr int64_t kShort = -5000;  // a read met the end of the file; below every -errno
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
