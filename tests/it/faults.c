/* What a device does on a bad day, to a program that knows nothing of it: loaded before it (LD_PRELOAD), this stands in front of
 * the reads and writes of files below $FAULTS_UNDER.
 *
 * $FAULTS_NOW names a file with the weather, read again for each call: a seed, and of a thousand calls how many fail with EIO,
 * how many writes with ENOSPC, how many do half of what they were asked for, how many come late; and how late, in
 * microseconds. No such file: fair. The n-th call of a process meets the same fault with the same seed. */
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

struct weather {
  unsigned long seed, eio, enospc, part, late, late_us;
};

static uint64_t calls;

static int under(int fd) {
  const char *folder = getenv("FAULTS_UNDER");
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path);
  return folder && length > 0 && !strncmp(path, folder, strlen(folder));
}

static int weather_now(struct weather *now) {
  char text[256];
  const char *path = getenv("FAULTS_NOW");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0)
    return 0;
  ssize_t length = NEXT(reading, "read")(fd, text, sizeof text - 1);
  close(fd);
  text[length > 0 ? length : 0] = 0;
  return sscanf(text, "%lu %lu %lu %lu %lu %lu", &now->seed, &now->eio, &now->enospc, &now->part, &now->late,
                &now->late_us) == 6;
}

/* Splitmix64. */
static uint64_t draw(uint64_t seed, uint64_t call) {
  uint64_t z = (seed << 32) + call * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* Bytes that the call may do, or -1 with errno. What is cut stays a multiple of 4 KiB, as direct access has it. */
static ssize_t allowed(int fd, size_t bytes, int is_write) {
  struct weather now;
  int before = errno;
  if (!under(fd) || !weather_now(&now)) {
    errno = before;
    return bytes;
  }
  errno = before;
  uint64_t dice = draw(now.seed, __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED));
  if ((dice >> 40) % 1000 < now.late)
    usleep(now.late_us);
  uint64_t roll = dice % 1000;
  if (roll < now.eio) {
    errno = EIO;
    return -1;
  }
  roll -= now.eio;
  if (is_write && roll < now.enospc) {
    errno = ENOSPC;
    return -1;
  }
  roll -= is_write ? now.enospc : 0;
  if (roll < now.part && bytes >= 8192)
    return bytes / 2 / 4096 * 4096;
  return bytes;
}

ssize_t read(int fd, void *into, size_t bytes) {
  ssize_t some = allowed(fd, bytes, 0);
  return some < 0 ? -1 : NEXT(reading, "read")(fd, into, some);
}

ssize_t write(int fd, const void *from, size_t bytes) {
  ssize_t some = allowed(fd, bytes, 1);
  return some < 0 ? -1 : NEXT(writing, "write")(fd, from, some);
}

ssize_t pread64(int fd, void *into, size_t bytes, off64_t at) {
  ssize_t some = allowed(fd, bytes, 0);
  return some < 0 ? -1 : NEXT(reading_at, "pread64")(fd, into, some, at);
}

ssize_t pwrite64(int fd, const void *from, size_t bytes, off64_t at) {
  ssize_t some = allowed(fd, bytes, 1);
  return some < 0 ? -1 : NEXT(writing_at, "pwrite64")(fd, from, some, at);
}

ssize_t pread(int fd, void *into, size_t bytes, off_t at) { return pread64(fd, into, bytes, at); }
ssize_t pwrite(int fd, const void *from, size_t bytes, off_t at) { return pwrite64(fd, from, bytes, at); }
