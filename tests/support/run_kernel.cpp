// Runs one kernel of a library over memory in a file:
//
//     run_kernel LIBRARY KERNEL FILE
//
// The file begins with int64 numbers: the address of the task, the number of regions, and for each
// region the address and size that it has in the calling process, its offset in the file, and
// whether it holds structures, whose pointers into regions are adjusted while the kernel runs.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>

struct Region {
  int64_t address, size, offset, has_pointers;
};

struct Header {
  int64_t task, num_regions;
  Region regions[];
};

// Where the file holds what `address` points to; `address` itself if it is in no region.
static int64_t moved(Header* header, int64_t address) {
  for (int64_t i = 0; i < header->num_regions; ++i) {
    const Region& region = header->regions[i];
    if (address >= region.address && address < region.address + region.size) {
      return reinterpret_cast<int64_t>(header) + region.offset + (address - region.address);
    }
  }
  return address;
}

static int64_t moved_back(Header* header, int64_t address) {
  const int64_t at = address - reinterpret_cast<int64_t>(header);
  for (int64_t i = 0; i < header->num_regions; ++i) {
    const Region& region = header->regions[i];
    if (at >= region.offset && at < region.offset + region.size) {
      return region.address + (at - region.offset);
    }
  }
  return address;
}

static void adjust_pointers(Header* header, int64_t (*move)(Header*, int64_t)) {
  for (int64_t i = 0; i < header->num_regions; ++i) {
    const Region& region = header->regions[i];
    if (!region.has_pointers) continue;
    auto* words = reinterpret_cast<int64_t*>(reinterpret_cast<char*>(header) + region.offset);
    for (int64_t word = 0; word < region.size / 8; ++word) words[word] = move(header, words[word]);
  }
}

int main(int, char** arguments) {
  void* const library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return fprintf(stderr, "%s\n", dlerror()), 1;
  const auto kernel = reinterpret_cast<void (*)(void*)>(dlsym(library, arguments[2]));
  const int file = open(arguments[3], O_RDWR);
  struct stat status;
  if (kernel == nullptr || file < 0 || fstat(file, &status) != 0) return 1;
  void* const memory =
      mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return 1;
  auto* const header = static_cast<Header*>(memory);
  adjust_pointers(header, moved);
  kernel(reinterpret_cast<void*>(moved(header, header->task)));
  adjust_pointers(header, moved_back);
  return 0;
}
