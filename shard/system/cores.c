// Keeps each thread of a parallel region on a core of its own.
#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>

// cores: [count]. Thread i of every region of `count` threads that the caller opens stays on cores[i]. 0, or how many
// threads the system refused that.
int keep(const int *cores, int count) {
    int failed = 0;
#pragma omp parallel num_threads(count) reduction(+ : failed)
    {
        cpu_set_t only;
        CPU_ZERO(&only);
        CPU_SET(cores[omp_get_thread_num()], &only);
        failed += sched_setaffinity(0, sizeof only, &only) != 0;
    }
    return failed;
}
