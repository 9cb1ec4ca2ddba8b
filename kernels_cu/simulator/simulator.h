// What prim.cuh includes instead of PTX when a kernel is compiled for the CPU.
#pragma once
#include <vector_functions.h>
#include "block.h"
#include "cost.h"
#include "numbers.h"
#include "warp.h"
#include "copy.h"
#include "matrix.h"
#include "bulk.h"
#include "semaphore.h"
#include "wgmma.h"
