#define QUIRE_NAME_OF(set) #set
#define QUIRE_NAME(set) QUIRE_NAME_OF(set)

namespace quire::QUIRE_ISA {

const char* name() { return QUIRE_NAME(QUIRE_ISA); }

}  // namespace quire::QUIRE_ISA
