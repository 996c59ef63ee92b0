// Pins each thread of a parallel region to one core.
#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>

// cores: [count]. Pins thread i of the caller's team of `count` threads to cores[i]. Returns the number of threads for
// which that failed.
int pin_threads(const int *cores, int count) {
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
