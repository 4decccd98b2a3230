// Layout of a page's record, the same as summary.RecordLayout.
#pragma once
#include "common.cuh"

constexpr int BASIS_AT = 0;
constexpr int COEFFICIENTS_AT = R * D / 2;
constexpr int CENTROID_AT = COEFFICIENTS_AT + PAGE * R;
constexpr int COEFFICIENT_SCALE_AT = CENTROID_AT + D;
constexpr int BASIS_SCALE_AT = COEFFICIENT_SCALE_AT + 2 * PAGE;
constexpr int CENTROID_SCALE_AT = BASIS_SCALE_AT + 2 * R;
constexpr int RECORD = (CENTROID_SCALE_AT + 2 + 63) / 64 * 64;
