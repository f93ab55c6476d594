/*
 * A pool of threads that share the tasks of one job at a time. Each thread, the caller included, takes the next task until
 * none is left, so that a thread which the system does not run delays nothing but its own task. Threads never touch Python.
 */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
/* How long a thread polls for work before it sleeps: longer than what lies between two jobs of an update */
#define SPIN_NANOSECONDS 100000
#define MAX_TASKS 0xffff

struct pool {
    /* Number of the job (32 bits), number of its tasks (16), and of those taken (16): changed at once, so that no thread takes
     * a task of a job that is over. */
    _Atomic uint64_t ticket;
    _Atomic int n_done, n_asleep, is_awaited, stops;
    /* Read by those alone who have taken a task */
    void (*task)(void *, int);
    void *job;
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    pid_t pid;
    int n_workers;
    pthread_t workers[MAX_THREADS];
};

static int n_tasks_of(uint64_t ticket)
{
    return ticket >> 16 & MAX_TASKS;
}

static int has_task(uint64_t ticket)
{
    return (int)(ticket & MAX_TASKS) < n_tasks_of(ticket);
}

/* Take a task and do it; 0 if there is none. */
static int take_task(struct pool *pool)
{
    uint64_t ticket = atomic_load(&pool->ticket);
    while (has_task(ticket))
        if (atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1)) {
            pool->task(pool->job, (int)(ticket & MAX_TASKS));
            if (atomic_fetch_add(&pool->n_done, 1) + 1 == n_tasks_of(ticket) && atomic_load(&pool->is_awaited)) {
                pthread_mutex_lock(&pool->mutex);
                pthread_cond_signal(&pool->done);
                pthread_mutex_unlock(&pool->mutex);
            }
            return 1;
        }
    return 0;
}

static int has_work(struct pool *pool)
{
    return has_task(atomic_load(&pool->ticket)) || atomic_load(&pool->stops);
}

static int is_done(struct pool *pool)
{
    return atomic_load(&pool->n_done) == n_tasks_of(atomic_load(&pool->ticket));
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Poll for a while; 0 if it did not come true. */
static int comes_true(int (*condition)(struct pool *), struct pool *pool)
{
    int64_t end = nanoseconds() + SPIN_NANOSECONDS;
    do
        for (int i = 0; i < 32; i++) {
            if (condition(pool))
                return 1;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ __volatile__("yield");
#endif
        }
    while (nanoseconds() < end);
    return 0;
}

static void *work(void *argument)
{
    struct pool *pool = argument;
    while (!atomic_load(&pool->stops)) {
        if (take_task(pool) || comes_true(has_work, pool))
            continue;
        pthread_mutex_lock(&pool->mutex);
        /* Either the caller sees that somebody sleeps, or the work is seen here. */
        atomic_fetch_add(&pool->n_asleep, 1);
        while (!has_work(pool))
            pthread_cond_wait(&pool->work, &pool->mutex);
        atomic_fetch_sub(&pool->n_asleep, 1);
        pthread_mutex_unlock(&pool->mutex);
    }
    return NULL;
}

static void wake(struct pool *pool)
{
    if (!atomic_load(&pool->n_asleep))
        return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
}

/* A pool with up to so many workers, fewer if the system does not permit more; NULL if there is not enough memory */
static struct pool *open_pool(int n_workers)
{
    struct pool *pool = calloc(1, sizeof(struct pool));
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL), pthread_cond_init(&pool->done, NULL);
    pool->pid = getpid();
    /* Signals are for the threads of Python. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->n_workers < n_workers && !pthread_create(&pool->workers[pool->n_workers], NULL, work, pool))
        pool->n_workers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}

static void close_pool(struct pool *pool)
{
    if (!pool)
        return;
    /* After a fork, the child has the memory, but not the threads. */
    if (pool->pid == getpid()) {
        atomic_store(&pool->stops, 1);
        wake(pool);
        for (int i = 0; i < pool->n_workers; i++)
            pthread_join(pool->workers[i], NULL);
        pthread_mutex_destroy(&pool->mutex);
        pthread_cond_destroy(&pool->work), pthread_cond_destroy(&pool->done);
    }
    free(pool);
}

/* Do all tasks of a job, by one caller at a time. The results must not depend on who does which task, and when. */
static void do_tasks(struct pool *pool, void (*task)(void *, int), void *job, long n_tasks)
{
    if (!pool || !pool->n_workers || n_tasks < 2 || n_tasks > MAX_TASKS) {
        for (int i = 0; i < n_tasks; i++)
            task(job, i);
        return;
    }
    pool->task = task, pool->job = job;
    atomic_store(&pool->n_done, 0);
    atomic_store(&pool->ticket, ((atomic_load(&pool->ticket) >> 32) + 1) << 32 | (uint64_t)n_tasks << 16);
    wake(pool);
    while (take_task(pool))
        ;
    if (comes_true(is_done, pool))
        return;
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->is_awaited, 1);
    while (!is_done(pool))
        pthread_cond_wait(&pool->done, &pool->mutex);
    atomic_store(&pool->is_awaited, 0);
    pthread_mutex_unlock(&pool->mutex);
}
