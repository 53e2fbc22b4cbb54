// Which sources a library was compiled from.

extern "C" __attribute__((visibility("default"))) const char* pw_sources() {
  return PAGEWIRE_SOURCES;
}
