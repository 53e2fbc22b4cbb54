// Moves the wall clock of the process that preloads it by the number of seconds in a file:
//
//     LD_PRELOAD=moved_clock.so CLOCK_FILE=seconds program
//
// The file holds one int64 and is mapped, so a write moves the clocks of running processes. Waits
// until a time of the wall clock end as if the system's clock had moved. They poll: whether the
// time has come is seen every `kSlice`.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <ctime>

namespace {

constexpr int64_t kSecond = 1'000'000'000, kSlice = kSecond / 50;

template <typename Function>
Function original(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

int64_t offset() {
  static const volatile int64_t* seconds = [] {
    const int file = open(getenv("CLOCK_FILE"), O_RDONLY);
    return static_cast<const int64_t*>(mmap(nullptr, 8, PROT_READ, MAP_SHARED, file, 0));
  }();
  return *seconds * kSecond;
}

int64_t nanoseconds(const timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }

timespec timespec_of(int64_t time) { return {time / kSecond, time % kSecond}; }

int64_t real_now() {
  timespec time;
  syscall(SYS_clock_gettime, CLOCK_REALTIME, &time);
  return nanoseconds(time);
}

bool has_come(const timespec& until) { return real_now() + offset() >= nanoseconds(until); }

// The system's time up to which to wait now.
timespec slice_before(const timespec& until) {
  const int64_t last = nanoseconds(until) - offset(), next = real_now() + kSlice;
  return timespec_of(last < next ? (last < 0 ? 0 : last) : next);
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) {
  const long result = syscall(SYS_clock_gettime, clock, time);
  if (result == 0 && clock == CLOCK_REALTIME) *time = timespec_of(nanoseconds(*time) + offset());
  return static_cast<int>(result);
}

int gettimeofday(timeval* time, void*) {
  const int64_t now = real_now() + offset();
  *time = {now / kSecond, now % kSecond / 1000};
  return 0;
}

time_t time(time_t* result) {
  const time_t now = (real_now() + offset()) / kSecond;
  if (result != nullptr) *result = now;
  return now;
}

// A wait that returns without a reason is allowed, and its caller looks again.
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  static const auto wait = original<decltype(&pthread_cond_timedwait)>("pthread_cond_timedwait");
  const bool is_monotonic = condition->__data.__wrefs & 2;
  if (is_monotonic) return wait(condition, mutex, until);
  const timespec slice = slice_before(*until);
  const int result = wait(condition, mutex, &slice);
  return result == ETIMEDOUT && !has_come(*until) ? 0 : result;
}

int sem_timedwait(sem_t* semaphore, const timespec* until) {
  static const auto wait = original<decltype(&sem_timedwait)>("sem_timedwait");
  for (;;) {
    const timespec slice = slice_before(*until);
    if (wait(semaphore, &slice) == 0) return 0;
    if (errno != ETIMEDOUT || has_come(*until)) return -1;
  }
}

long syscall_of(long number, const long* arguments) {
  static const auto call = original<long (*)(long, ...)>("syscall");
  return call(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
              arguments[5]);
}

// Abseil, and so gRPC, waits on futexes itself.
long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  const auto until = reinterpret_cast<const timespec*>(arguments[3]);
  const bool waits = number == SYS_futex && until != nullptr &&
                     (arguments[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET &&
                     (arguments[1] & FUTEX_CLOCK_REALTIME);
  if (!waits) return syscall_of(number, arguments);
  const timespec slice = slice_before(*until);
  arguments[3] = reinterpret_cast<long>(&slice);
  const long result = syscall_of(number, arguments);
  if (result == -1 && errno == ETIMEDOUT && !has_come(*until)) errno = EINTR;
  return result;
}

}  // extern "C"
