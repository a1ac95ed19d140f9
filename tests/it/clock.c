/* A wrong clock. Loaded before the program (LD_PRELOAD), this library shifts the time of day by $CLOCK_OFFSET_SECONDS.
 * Clocks that measure durations stay as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

typedef int (*clock_call)(clockid_t, struct timespec *);

static long offset(void) {
  const char *text = getenv("CLOCK_OFFSET_SECONDS");
  return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static clock_call next;
  if (!next)
    next = (clock_call)dlsym(RTLD_NEXT, "clock_gettime");
  int status = next(clock, now);
  if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += offset();
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec precise;
  int status = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return status;
}

time_t time(time_t *now) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now)
    *now = precise.tv_sec;
  return precise.tv_sec;
}
