// Asynchronous transfers between aligned memory and files, by io_uring.
//
//     void* engine = threed_io_open(fd, depth, piece, &error);
//     int64_t id = threed_io_submit(engine, write, fd, memory, length, offset, block);
//     int64_t moved = threed_io_wait(engine, id);      // length, or -errno, or kShort; once for each id
//     threed_io_close(engine);
//
// A transfer is cut into pieces of `piece` bytes, of which at most `depth` are in the ring at once. `block` is the
// alignment that the file's direct I/O requires, 1 for buffered files: memory, length and offset are multiples of it.
// Every result is read: short transfers continue, and interrupted ones start again.

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <unordered_map>
#include <vector>

#include "io_ring.h"

namespace {

#ifdef THREED_RING

constexpr int64_t kShort = -5000;  // a read met the end of the file; below every -errno

struct Piece {
    int64_t request;
    bool write;
    int fd;
    char* memory;
    int64_t length, offset, block;
    int64_t moved = 0;
};

// Applies the result of one system call: returns 0 to continue, else the piece's result.
int64_t advance(Piece& piece, int64_t count) {
    if (count == -EINTR || count == -EAGAIN) return 0;
    if (count < 0) return count;
    count -= count % piece.block;  // a direct transfer can continue only at a block
    if (count == 0) return piece.write ? -EIO : kShort;
    piece.moved += count;
    return piece.moved == piece.length ? piece.length : 0;
}

class Engine {
public:
    Engine(int depth, int64_t piece) : depth_(depth), piece_(piece) {}

    ~Engine() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake();
        if (thread_.joinable()) thread_.join();
        if (wakeup_ >= 0) close(wakeup_);
    }

    // Starts the ring on a thread of its own; returns -errno if the kernel does not allow it.
    int start(int file) {
        wakeup_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wakeup_ < 0) return -errno;
        std::promise<int> promise;
        std::future<int> started = promise.get_future();
        thread_ = std::thread(&Engine::run, this, file, std::move(promise));
        return started.get();
    }

    int64_t submit(bool write, int fd, char* memory, int64_t length, int64_t offset, int64_t block) {
        if (length <= 0 || block <= 0 || piece_ % block) return -EINVAL;
        if (offset % block || length % block || reinterpret_cast<uintptr_t>(memory) % block) return -EINVAL;
        std::list<Piece> pieces;  // spliced below, which cannot fail half-way
        std::lock_guard<std::mutex> lock(mutex_);
        if (failed_) return failed_;
        int64_t id = ++last_;
        for (int64_t at = 0; at < length; at += piece_)
            pieces.push_back({id, write, fd, memory + at, std::min(piece_, length - at), offset + at, block});
        requests_[id].pieces = static_cast<int64_t>(pieces.size());
        queue_.splice(queue_.end(), pieces);
        wake();
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
    static constexpr uint64_t kWakeup = ~0ull;

    struct Request {
        int64_t pieces = 0, moved = 0, error = 0;
    };

    void wake() {
        if (wakeup_ >= 0) eventfd_write(wakeup_, 1);
    }

    // Takes the next piece of the queue; pieces of a request that has failed are settled here. Needs the mutex.
    bool next(Piece& piece) {
        while (!queue_.empty()) {
            piece = queue_.front();
            queue_.pop_front();
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

    void run(int file, std::promise<int> started) {
        Ring ring;
        int said = ring.open(depth_ + 1);  // and one entry for the wake-up call
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
            if (said < 0) return fail(under_way, free, said);
            ring.reap([&](uint64_t tag, int count) {
                if (tag == kWakeup) {
                    eventfd_t calls;
                    eventfd_read(wakeup_, &calls);
                    listening = false;  // a poll reports once
                    return;
                }
                Piece& piece = under_way[tag];
                int64_t result = advance(piece, count);
                std::lock_guard<std::mutex> lock(mutex_);
                if (result == 0) queue_.push_front(piece);
                else settle(piece, result);
                free.push_back(static_cast<int>(tag));
            });
        }
    }

    // Puts queued pieces into free slots; returns whether the thread has to go on.
    bool feed(Ring& ring, std::vector<Piece>& under_way, std::vector<int>& free) {
        std::lock_guard<std::mutex> lock(mutex_);
        Piece piece;
        while (!free.empty() && next(piece)) {
            int slot = free.back();
            under_way[slot] = piece;
            free.pop_back();
            ring.put(piece.write ? IORING_OP_WRITE : IORING_OP_READ, piece.fd, piece.memory + piece.moved,
                     static_cast<uint32_t>(piece.length - piece.moved), piece.offset + piece.moved, slot);
        }
        return !stopping_ || free.size() < under_way.size();
    }

    // The ring itself failed: all pieces have failed, and all later transfers fail.
    void fail(const std::vector<Piece>& under_way, const std::vector<int>& free, int64_t said) {
        std::lock_guard<std::mutex> lock(mutex_);
        failed_ = said;
        std::vector<bool> idle(under_way.size());
        for (int slot : free) idle[slot] = true;
        for (size_t slot = 0; slot < idle.size(); ++slot)
            if (!idle[slot]) settle(under_way[slot], said);
        for (const Piece& piece : queue_) settle(piece, said);
        queue_.clear();
    }

    const int depth_;
    const int64_t piece_;
    int wakeup_ = -1;
    std::mutex mutex_;  // guards all below, but the thread
    std::condition_variable finished_;
    std::list<Piece> queue_;
    std::unordered_map<int64_t, Request> requests_;
    int64_t last_ = 0, failed_ = 0;
    bool stopping_ = false;
    std::thread thread_;
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

void* open_engine(int fd, int depth, int64_t piece, int* error) {
    Engine* engine = nullptr;
    *error = static_cast<int>(guarded([&]() -> int64_t {
        if (depth <= 0 || piece <= 0 || piece % kPage || piece > (1 << 30)) return -EINVAL;
        auto made = std::make_unique<Engine>(depth, piece);
        int said = made->start(fd);
        if (said == 0) engine = made.release();
        return said;
    }));
    return engine;
}

#else

struct Engine {
    int64_t submit(bool, int, char*, int64_t, int64_t, int64_t) { return -ENOSYS; }
    int64_t wait(int64_t) { return -ENOSYS; }
    bool done(int64_t) { return true; }
};

template <typename Body>
int64_t guarded(Body body) {
    return body();
}

void* open_engine(int, int, int64_t, int* error) {
    *error = -ENOSYS;
    return nullptr;
}

#endif

}  // namespace

extern "C" {

// `fd`: a file to try io_uring on, at least a page long. Returns null, and sets `error` to -errno, if io_uring cannot
// be used.
void* threed_io_open(int fd, int depth, int64_t piece, int* error) { return open_engine(fd, depth, piece, error); }

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
