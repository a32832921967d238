/* A team of threads. Every caller works on its own job, and idle members join the oldest job with
 * pieces left. All the state is under one mutex; nobody waits for a thread, only for work, so nested
 * and concurrent callers cannot deadlock and a member that wakes late costs nothing. Whoever waits looks
 * out for some microseconds before it sleeps, for waking takes as long as a small job.
 *
 * The pool of scratch memory lies here too, under the same mutex: calls reuse it, so that a call need
 * not fault in fresh pages.
 */
#ifndef FASTMHA_TEAM_H
#define FASTMHA_TEAM_H
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef _WIN32
#include <windows.h>
#define MUTEX SRWLOCK
#define COND CONDITION_VARIABLE
#define MUTEX_INIT SRWLOCK_INIT
#define COND_INIT CONDITION_VARIABLE_INIT
#define team_lock() AcquireSRWLockExclusive(&mutex)
#define team_unlock() ReleaseSRWLockExclusive(&mutex)
#define team_wait(cond) SleepConditionVariableSRW(cond, &mutex, INFINITE, 0)
#define wake_one WakeConditionVariable
#define wake_all WakeAllConditionVariable
#define THREAD(f) static DWORD WINAPI f(LPVOID unused)
static int start_thread(LPTHREAD_START_ROUTINE f) {
  HANDLE h = CreateThread(0, 0, f, 0, 0, 0);
  return h && CloseHandle(h);
}
static double now(void) { return GetTickCount64() * 1e-3; }
#define EXPORT __declspec(dllexport)
#else
#include <pthread.h>
#include <time.h>
#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#define MUTEX pthread_mutex_t
#define COND pthread_cond_t
#define MUTEX_INIT PTHREAD_MUTEX_INITIALIZER
#define COND_INIT PTHREAD_COND_INITIALIZER
#define team_lock() pthread_mutex_lock(&mutex)
#define team_unlock() pthread_mutex_unlock(&mutex)
#define team_wait(cond) pthread_cond_wait(cond, &mutex)
#define wake_one pthread_cond_signal
#define wake_all pthread_cond_broadcast
#define THREAD(f) static void *f(void *unused)
static int start_thread(void *(*f)(void *)) {
  pthread_t t;
  return !pthread_create(&t, 0, f, 0) && !pthread_detach(t);
}
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
#define EXPORT __attribute__((visibility("default")))
#endif
#if defined(__x86_64__) || defined(__i386__)
#define pause_a_moment() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define pause_a_moment() __asm__ volatile("isb")
#else
#define pause_a_moment() __asm__ volatile("")
#endif

/* One piece of a job: `slot` is below the job's number of threads and no two pieces that run at the
 * same time have the same one. */
typedef void (*Body)(void *arg, ptrdiff_t piece, int slot);
/* Asked by the caller's thread now and then; anything but 0 ends the job early. */
typedef int (*Poll)(void);
typedef struct Job {
  Body body;
  void *arg;
  ptrdiff_t pieces, next;
  unsigned running; /* how many members take part now */
  int threads, slots;
  unsigned process;
  struct Job *after;
} Job;

/* A thread of the team. */
typedef struct Member {
  COND work;
  int woken;
  struct Member *after; /* of those that sleep */
#ifdef __linux__
  pid_t thread;
  int moved;
  cpu_set_t allowed; /* where it may run, if moved */
#endif
} Member;

/* Linux may wake a thread on the processor of the one that wakes it, though others are idle: in virtual machines, those
 * that have been idle for a while look as if they were taken. The two would share it for many small jobs. So a sleeper
 * is kept off its caller's processor until it is up. */
#ifdef __linux__
static void keep_off(Member *sleeper) {
  cpu_set_t others;
  const int here = sched_getcpu();
  if (here < 0 || here >= CPU_SETSIZE || sched_getaffinity(sleeper->thread, sizeof others, &others)) return;
  sleeper->allowed = others;
  CPU_CLR(here, &others);
  sleeper->moved = CPU_COUNT(&others) && !sched_setaffinity(sleeper->thread, sizeof others, &others);
}
static void stand_up(Member *self) {
  if (self->moved) sched_setaffinity(0, sizeof self->allowed, &self->allowed);
  self->moved = 0;
}
#else
static void keep_off(Member *sleeper) { (void)sleeper; }
static void stand_up(Member *self) { (void)self; }
#endif

/* What run_job returns in a child that `poll` forked in the middle: what helpers worked on is lacking. */
enum { FORKED = -2 };

static MUTEX mutex = MUTEX_INIT;
static COND finished = COND_INIT;
static Job *jobs;
static Member *sleepers;
static int members, looking; /* all of them, and those who will see the next job posted */
static unsigned posted;              /* how many jobs there were */
static unsigned process; /* how many forks lie between this process and the first */

/* The most threads a job gets; exported for threadpoolctl, which reaches them through ctypes. */
static int limit = 1;
EXPORT int fastmha_get_num_threads(void) { return __atomic_load_n(&limit, __ATOMIC_RELAXED); }
EXPORT void fastmha_set_num_threads(int n) { __atomic_store_n(&limit, n < 1 ? 1 : n, __ATOMIC_RELAXED); }

/* With the mutex held, but released meanwhile: waits a little for the number to change. True if it did. */
static int look_out(const unsigned *number) {
  enum { MOMENTS = 1000 };
  const unsigned before = *number;
  team_unlock();
  for (int i = 0; i < MOMENTS && __atomic_load_n(number, __ATOMIC_RELAXED) == before; i++) pause_a_moment();
  team_lock();
  return *number != before;
}

/* With the mutex held. What others look out for is written as such. */
static void change(unsigned *number, int by) { __atomic_store_n(number, *number + by, __ATOMIC_RELAXED); }

/* With the mutex held: works on the job until no piece is left. */
static void take_part(Job *job, int slot) {
  change(&job->running, 1);
  while (job->next < job->pieces) {
    ptrdiff_t piece = job->next++;
    team_unlock();
    job->body(job->arg, piece, slot);
    team_lock();
  }
  change(&job->running, -1);
  if (!job->running) wake_all(&finished);
}

THREAD(member) {
  Member self = {COND_INIT};
  (void)unused;
#ifdef __linux__
  self.thread = (pid_t)syscall(SYS_gettid);
#endif
  team_lock();
  for (;;) {
    Job *job = jobs;
    while (job && (job->next >= job->pieces || job->slots >= job->threads)) job = job->after;
    if (job) {
      take_part(job, job->slots++);
    } else {
      looking++;
      if (look_out(&posted)) continue; /* who posted knows that nobody is looking now */
      looking--;
      self.woken = 0;
      self.after = sleepers;
      sleepers = &self;
      while (!self.woken) team_wait(&self.work);
      stand_up(&self);
    }
  }
  return 0;
}

#ifndef _WIN32
/* A child has none of its parent's threads. The mutex is held across the fork, so the pool is whole. */
static void before_fork(void) { team_lock(); }
static void after_fork(void) { team_unlock(); }
static void in_child(void) {
  jobs = 0;
  sleepers = 0;
  members = looking = 0;
  process++;
  pthread_mutex_init(&mutex, 0);
  pthread_cond_init(&finished, 0);
}
#endif

/* At import, under the interpreter's import lock. */
static void start_team(void) {
#ifndef _WIN32
  static int hooked;
  if (!hooked) hooked = !pthread_atfork(before_fork, after_fork, in_child);
#endif
}

/* body(arg, i, slot) for i in 0..pieces, on up to `threads` threads, this one included. Returns what
 * `poll` did where it ended the job early, FORKED where some pieces are lacking, else 0. */
static int run_job(Body body, void *arg, ptrdiff_t pieces, int threads, Poll poll) {
  const double patience = 0.1;
  double asked = now();
  int ended = 0;
  Job job = {body, arg, pieces, 0, 0, threads, 1, process, 0};
  if (threads > 1) {
    team_lock();
    Job **last = &jobs;
    while (*last) last = &(*last)->after;
    *last = &job;
    change(&posted, 1);
    while (members < threads - 1 && start_thread(member)) members++;
    for (int t = looking + 1; t < threads && sleepers; t++) {
      Member *sleeper = sleepers;
      sleepers = sleeper->after;
      sleeper->woken = 1;
      keep_off(sleeper);
      wake_one(&sleeper->work);
    }
    looking = 0;
    team_unlock();
  }
  while (!ended) {
    /* Alone, `next` needs no lock. */
    if (threads > 1) team_lock();
    ptrdiff_t piece = job.next < pieces ? job.next++ : pieces;
    if (threads > 1) team_unlock();
    if (piece == pieces) break;
    body(arg, piece, 0);
    if (poll && now() - asked > patience) {
      ended = poll();
      asked = now();
    }
  }
  if (threads > 1) {
    team_lock();
    job.next = pieces;
    if (job.process == process) {
      while (job.running)
        if (!look_out(&job.running)) team_wait(&finished);
      Job **last = &jobs;
      while (*last != &job) last = &(*last)->after;
      *last = job.after;
    } else if (job.running && !ended) { /* `poll` forked: the helpers stayed in the parent */
      ended = FORKED;
    }
    team_unlock();
  }
  return ended;
}

/* For long pieces: asks `poll`, if it is a while since `asked`. */
static int poll_now_and_then(double *asked, Poll poll) {
  const double patience = 0.1, time = now();
  if (time - *asked <= patience) return 0;
  *asked = time;
  return poll();
}

/* Scratch memory, 64-byte aligned: the POOL_SIZE blocks given back last are kept for the next calls. */
enum { POOL_SIZE = 8, ALIGNMENT = 64 };
typedef struct Block {
  void *start;
  size_t size;
} Block;
static Block pool[POOL_SIZE];

static Block take_scratch(size_t size) {
  Block block = {0, size};
  team_lock();
  for (int i = 0; i < POOL_SIZE; i++)
    if (pool[i].start && pool[i].size >= size) {
      block = pool[i];
      pool[i].start = 0;
      break;
    }
  team_unlock();
  if (!block.start) {
    char *raw = size < SIZE_MAX - 2 * ALIGNMENT ? (char *)malloc(size + 2 * ALIGNMENT) : 0;
    if (raw) {
      block.start = (void *)(((uintptr_t)raw + 2 * ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
      ((void **)block.start)[-1] = raw;
    }
  }
  return block;
}

static void free_block(Block block) {
  if (block.start) free(((void **)block.start)[-1]);
}

static void give_scratch(Block block) {
  const size_t keep = (size_t)8 << 20; /* larger ones are not worth keeping */
  if (block.start && block.size <= keep) {
    Block spare = block;
    team_lock();
    for (int i = 0; i < POOL_SIZE; i++)
      if (!pool[i].start || pool[i].size < spare.size) {
        Block other = pool[i];
        pool[i] = spare;
        spare = other;
        if (!spare.start) break;
      }
    team_unlock();
    block = spare;
  }
  free_block(block);
}
#endif
