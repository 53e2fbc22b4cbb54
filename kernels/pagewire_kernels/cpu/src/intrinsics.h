// The processor's vector instructions. To be included before anything else that includes them: GCC 12
// finds their undefined operands to be used uninitialized (its bug 105593).
#pragma once

#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>
