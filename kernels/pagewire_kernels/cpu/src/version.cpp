// The digest of the sources from which the library was compiled.

extern "C" __attribute__((visibility("default"))) const char* pw_sources() {
  return PAGEWIRE_SOURCES;
}
