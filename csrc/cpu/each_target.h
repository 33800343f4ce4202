// Includes the header KERNEL_HEADER once per instruction set (targets.h).

namespace portable {
#include KERNEL_HEADER
}

#ifdef X86
TARGET_BEGIN(AVX2)
namespace avx2 {
#include KERNEL_HEADER
}
TARGET_END
TARGET_BEGIN(AVX512)
namespace avx512 {
#include KERNEL_HEADER
}
TARGET_END
#endif
