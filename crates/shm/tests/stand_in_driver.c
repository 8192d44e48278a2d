/* A stand-in for the CUDA driver: "memory of a GPU" is a POSIX shared memory object, and the IPC handle of such memory
 * is the object's name, padded with zeros to 64 bytes. Only what the server calls is there. As in the real driver, calls
 * need cuInit, and those that touch memory need a current context on their thread.
 *
 *     cc -shared -fPIC -o libcuda.so.1 stand_in_driver.c
 */
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
};

enum { DEVICES = 2, OPEN = 64, DEPTH = 8 };

typedef struct {
    char reserved[64];
} Handle;

typedef struct {
    char *base;
    size_t size;
} Allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation open_memory[OPEN];
static int initialized;
static int retained[DEVICES];
static __thread void *current[DEPTH];
static __thread int depth;

int cuInit(unsigned flags) {
    if (flags != 0) return INVALID_VALUE;
    initialized = 1;
    return SUCCESS;
}

int cuGetErrorString(int status, const char **text) {
    switch (status) {
    case INVALID_VALUE: *text = "invalid argument"; return SUCCESS;
    case NOT_INITIALIZED: *text = "initialization error"; return SUCCESS;
    case INVALID_DEVICE: *text = "invalid device ordinal"; return SUCCESS;
    case INVALID_CONTEXT: *text = "invalid device context"; return SUCCESS;
    default: *text = NULL; return INVALID_VALUE;
    }
}

int cuDeviceGetCount(int *count) {
    if (!initialized) return NOT_INITIALIZED;
    *count = DEVICES;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    retained[device]++;
    pthread_mutex_unlock(&lock);
    *context = &retained[device];
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    pthread_mutex_lock(&lock);
    int had = retained[device]--;
    pthread_mutex_unlock(&lock);
    return had > 0 ? SUCCESS : INVALID_CONTEXT;
}

int cuCtxPushCurrent_v2(void *context) {
    if (depth == DEPTH || *(int *)context <= 0) return INVALID_CONTEXT;
    current[depth++] = context;
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context) {
    if (depth == 0) return INVALID_CONTEXT;
    *context = current[--depth];
    return SUCCESS;
}

static Allocation *find(unsigned long long pointer) {
    for (int i = 0; i < OPEN; i++) {
        char *base = open_memory[i].base;
        if (base && (char *)pointer >= base && (char *)pointer < base + open_memory[i].size) return &open_memory[i];
    }
    return NULL;
}

int cuIpcOpenMemHandle_v2(unsigned long long *pointer, Handle handle, unsigned flags) {
    if (depth == 0) return INVALID_CONTEXT;
    if (flags != 1 || handle.reserved[0] != '/' || !memchr(handle.reserved, 0, sizeof handle.reserved)) {
        return INVALID_VALUE;
    }
    int fd = shm_open(handle.reserved, O_RDWR, 0);
    if (fd < 0) return INVALID_VALUE;
    struct stat found;
    fstat(fd, &found);
    char *base = mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) return INVALID_VALUE;
    int status = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < OPEN; i++) {
        if (open_memory[i].base) continue;
        open_memory[i] = (Allocation){base, found.st_size};
        *pointer = (unsigned long long)base;
        status = SUCCESS;
        break;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int cuIpcCloseMemHandle(unsigned long long pointer) {
    if (depth == 0) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Allocation *found = find(pointer);
    int status = found && found->base == (char *)pointer ? SUCCESS : INVALID_VALUE;
    if (status == SUCCESS) {
        munmap(found->base, found->size);
        found->base = NULL;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long pointer) {
    if (depth == 0) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Allocation *found = find(pointer);
    if (found) {
        *base = (unsigned long long)found->base;
        *size = found->size;
    }
    pthread_mutex_unlock(&lock);
    return found ? SUCCESS : INVALID_VALUE;
}

/* Bytes of copies to the device, which are there only after a synchronisation, as small copies of the real driver. */
static __thread struct {
    char *to;
    char bytes[1 << 16];
    size_t size;
} begun;

int cuCtxSynchronize(void) {
    if (depth == 0) return INVALID_CONTEXT;
    memcpy(begun.to, begun.bytes, begun.size);
    begun.size = 0;
    return SUCCESS;
}

static int copy(void *to, const void *from, size_t size, unsigned long long device) {
    if (depth == 0) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Allocation *found = find(device);
    int inside = found && (char *)device + size <= found->base + found->size;
    pthread_mutex_unlock(&lock);
    if (!inside) return INVALID_VALUE;
    memcpy(to, from, size);
    return SUCCESS;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) {
    return copy(to, (void *)from, size, from);
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) {
    if (size > sizeof begun.bytes) return copy((void *)to, from, size, to);
    int status = copy(begun.bytes, from, size, to);
    begun.to = (char *)to;
    begun.size = status == SUCCESS ? size : 0;
    return status;
}
