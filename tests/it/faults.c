/* Fault injection for file I/O. Loaded before the program (LD_PRELOAD), this library wraps reads and writes of files
 * below $FAULTS_FOLDER.
 *
 * $FAULTS_PROFILE names a file that is read again for each call. It has a seed, then of 1,000 calls how many fail with
 * EIO, how many writes fail with ENOSPC, how many transfer half of their bytes, how many are delayed, and the delay in
 * microseconds. Without the file nothing fails. With the same seed, the n-th call of a process meets the same fault. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*reading)(int, void *, size_t);
typedef ssize_t (*writing)(int, const void *, size_t);
typedef ssize_t (*reading_at)(int, void *, size_t, off64_t);
typedef ssize_t (*writing_at)(int, const void *, size_t, off64_t);

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))

struct profile {
  unsigned long seed, eio, enospc, partial, delayed, delay_us;
};

static uint64_t calls;

static int is_covered(int fd) {
  const char *folder = getenv("FAULTS_FOLDER");
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path);
  return folder && length > 0 && !strncmp(path, folder, strlen(folder));
}

static int read_profile(struct profile *profile) {
  char text[256];
  const char *path = getenv("FAULTS_PROFILE");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0)
    return 0;
  ssize_t length = NEXT(reading, "read")(fd, text, sizeof text - 1);
  close(fd);
  text[length > 0 ? length : 0] = 0;
  return sscanf(text, "%lu %lu %lu %lu %lu %lu", &profile->seed, &profile->eio, &profile->enospc,
                &profile->partial, &profile->delayed, &profile->delay_us) == 6;
}

/* SplitMix64. */
static uint64_t random_number(uint64_t seed, uint64_t call) {
  uint64_t z = (seed << 32) + call * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* Bytes that the call may transfer, or -1 with errno. Short transfers are multiples of 4 KiB, for direct I/O. */
static ssize_t allowed(int fd, size_t bytes, int is_write) {
  struct profile profile;
  int saved_errno = errno;
  if (!is_covered(fd) || !read_profile(&profile)) {
    errno = saved_errno;
    return bytes;
  }
  errno = saved_errno;
  uint64_t random = random_number(profile.seed, __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED));
  if ((random >> 40) % 1000 < profile.delayed)
    usleep(profile.delay_us);
  uint64_t n = random % 1000;
  if (n < profile.eio) {
    errno = EIO;
    return -1;
  }
  n -= profile.eio;
  if (is_write && n < profile.enospc) {
    errno = ENOSPC;
    return -1;
  }
  n -= is_write ? profile.enospc : 0;
  if (n < profile.partial && bytes >= 8192)
    return bytes / 2 / 4096 * 4096;
  return bytes;
}

ssize_t read(int fd, void *into, size_t bytes) {
  ssize_t allowed_bytes = allowed(fd, bytes, 0);
  return allowed_bytes < 0 ? -1 : NEXT(reading, "read")(fd, into, allowed_bytes);
}

ssize_t write(int fd, const void *from, size_t bytes) {
  ssize_t allowed_bytes = allowed(fd, bytes, 1);
  return allowed_bytes < 0 ? -1 : NEXT(writing, "write")(fd, from, allowed_bytes);
}

ssize_t pread64(int fd, void *into, size_t bytes, off64_t at) {
  ssize_t allowed_bytes = allowed(fd, bytes, 0);
  return allowed_bytes < 0 ? -1 : NEXT(reading_at, "pread64")(fd, into, allowed_bytes, at);
}

ssize_t pwrite64(int fd, const void *from, size_t bytes, off64_t at) {
  ssize_t allowed_bytes = allowed(fd, bytes, 1);
  return allowed_bytes < 0 ? -1 : NEXT(writing_at, "pwrite64")(fd, from, allowed_bytes, at);
}

ssize_t pread(int fd, void *into, size_t bytes, off_t at) { return pread64(fd, into, bytes, at); }
ssize_t pwrite(int fd, const void *from, size_t bytes, off_t at) { return pwrite64(fd, from, bytes, at); }
