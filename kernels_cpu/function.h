// A score function of the caller's: its program, its arguments, and what the core says of a tile. The interpreter,
// function.cpp, is a library of its own, which the core calls by the pointer that comes with the program.
#pragma once
#include "call.h"

// What an instruction does. why numbers: they are the indices of a table in cupy_flash/program/machine.py.
enum Op : int32_t {
    kBatch,
    kHead,
    kQuery,
    kKey,
    kConstantFloat,
    kConstantInt,
    kConstantBool,
    kLoadFloat,
    kLoadInt,
    kLoadBool,
    kCopy,
    kSpread,
    kSlope,
    kShare,
    kBoolToFloat,
    kIntToFloat,
    kBoolToInt,
    kAddFloat,
    kSubtractFloat,
    kMultiplyFloat,
    kDivideFloat,
    kNegativeFloat,
    kAbsoluteFloat,
    kMinimumFloat,
    kMaximumFloat,
    kExp,
    kLog,
    kTanh,
    kSqrt,
    kAddInt,
    kSubtractInt,
    kMultiplyInt,
    kFloorDivideInt,
    kRemainderInt,
    kNegativeInt,
    kAbsoluteInt,
    kMinimumInt,
    kMaximumInt,
    kLessFloat,
    kLessEqualFloat,
    kEqualFloat,
    kNotEqualFloat,
    kLessInt,
    kLessEqualInt,
    kEqualInt,
    kNotEqualInt,
    kAnd,
    kOr,
    kNot,
    kWhere
};    // clang-format: a table

// How far a value reaches: one for each lane, for each key, or for each pair of them.
enum Reach : int32_t { kOfLanes, kOfKeys, kOfPairs };

// Registers hold reals, integers of 32 bits in as many bits as a real, or conditions, all bits of it.
enum Register : int32_t { kScore, kResult, kGradient, kKept, kFirstRegister, kMostRegisters = 256 };

// What the program of gradients begins with, in the place of scores: it computes again what comes behind.
enum Keeps : int32_t { kNothing, kScores, kMade };

constexpr int kMostAxes = 4;

struct Instruction {
    int32_t op, reach;    // of what it makes; of kShare, of the place that it adds to
    int32_t to;           // a register
    int32_t from[kMostAxes + 1];
    int32_t array, unused;    // of loads, and of kShare
    double value;             // of a constant
};

struct FunctionProgram {
    const Instruction* code;
    int64_t count[3];        // of instructions for lanes, then for keys, then for pairs
    int64_t registers[3];    // the same of registers, in this order from kFirstRegister on
};

struct FunctionArray {
    const void* data;
    void* gradient;    // null, unless it is learned
    int64_t strides[kMostAxes], gradient_strides[kMostAxes];
    int64_t extents[kMostAxes];
    int64_t sums;    // where its own begin, among those of a slice; in the order of C
    int32_t axes, type, gradient_type;
    int32_t far;    // an offset may have more than 31 bits
};
enum Stored : int32_t { kOfF32, kOfF16, kOfBf16, kOfF64, kOfInt32, kOfInt8, kOfUint8, kOfBool };

// What the core says of a tile (keys x kPanel), from key `from` on. why void: function.h is above panel.h and score.h.
struct FunctionTile {
    const void *score, *panel;    // Score and Panel
    void* scores;                 // become what the function makes of them
    void* gradient;               // of what it made: becomes that of the scores. Null: values are wanted
    const void* seen;             // of the mask, as Score reads it; or null
    void* space;                  // function_reals: two tiles, what is seen and what is kept; registers
    double* sums;                 // for the gradients of learned arguments; or null
    int64_t from, keys;
};

struct Function {
    // Stops a call in which a pair that is seen reads outside of an argument.
    void (*run)(const FunctionTile&);
    FunctionProgram value, slope;
    FunctionArray* arrays;
    double* sums;    // (slices, sums_each) of the gradients of learned arguments
    int64_t sums_each, slices, array_count;
    int32_t reads;          // whether it reads arguments by index
    int32_t array, axis;    // of an index outside
    int32_t index;
    int32_t hides;    // whether it hides pairs and leaves other scores as they are
    int32_t keeps;    // of Keeps
};

extern "C" {
EXPORTED void cupy_flash_function_float(const FunctionTile&);
EXPORTED void cupy_flash_function_double(const FunctionTile&);
EXPORTED int32_t
cupy_flash_function_sums(Call*);    // [F.3] slices are added up and written, after a backward pass
}
