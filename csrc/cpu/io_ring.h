// io_uring by raw system calls; see io.cpp.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <unistd.h>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define THREED_RING 1
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#endif

namespace {

constexpr int64_t kPage = 4096;

#ifdef THREED_RING

// A ring as io_uring(7) and the kernel's header describe it; all of it is used by one thread.
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
        alignas(kPage) char page[kPage];
        for (bool read : {false, true}) {
            put(read ? IORING_OP_READ : IORING_OP_NOP, read ? file : -1, read ? page : nullptr, read ? kPage : 0, 0, 0);
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

}  // namespace
