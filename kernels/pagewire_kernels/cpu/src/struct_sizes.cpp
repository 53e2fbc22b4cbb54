// The sizes of the structures that several kernels share.
#include "attention.h"
#include "batch.h"
#include "experts.h"
#include "layers.h"
#include "linear.h"
#include "team.h"

using namespace pagewire;

PAGEWIRE_STRUCT_SIZE(Batch)
PAGEWIRE_STRUCT_SIZE(AttentionTask)
PAGEWIRE_STRUCT_SIZE(NormTask)
PAGEWIRE_STRUCT_SIZE(ActivationTask)
PAGEWIRE_STRUCT_SIZE(ElementwiseTask)
PAGEWIRE_STRUCT_SIZE(StreamsTask)
PAGEWIRE_STRUCT_SIZE(GatedStreamsTask)
PAGEWIRE_STRUCT_SIZE(RotateTask)
PAGEWIRE_STRUCT_SIZE(LatentTask)
PAGEWIRE_STRUCT_SIZE(TakeTask)
PAGEWIRE_STRUCT_SIZE(SumRowsTask)
PAGEWIRE_STRUCT_SIZE(PermuteTask)
PAGEWIRE_STRUCT_SIZE(LargestTask)
PAGEWIRE_STRUCT_SIZE(LinearTask)
PAGEWIRE_STRUCT_SIZE(HeadsTask)
PAGEWIRE_STRUCT_SIZE(PackTask)
PAGEWIRE_STRUCT_SIZE(GatherTask)
PAGEWIRE_STRUCT_SIZE(QuantizedPackTask)
PAGEWIRE_STRUCT_SIZE(ExpertPlan)
PAGEWIRE_STRUCT_SIZE(RouteTask)
PAGEWIRE_STRUCT_SIZE(ExpertsTask)
PAGEWIRE_STRUCT_SIZE(ExpertAdapterTask)
PAGEWIRE_STRUCT_SIZE(ScatterTask)
PAGEWIRE_STRUCT_SIZE(CombineTask)
