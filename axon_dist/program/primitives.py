"""What JAX's primitives are, by name, for all who treat a kind of them alike."""

# fmt: off
EACH = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "clz", "complex", "convert_element_type", "copy", "cos", "cosh", "digamma", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "population_count",
    "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
"""Operations whose every element depends on the elements at the same place, and parameters alone.

A name that is missing costs speed, and nothing else."""

COMPARES = frozenset(("eq", "ge", "gt", "is_finite", "le", "lt", "ne"))
"""Those of `EACH` whose results are a byte per element, and their operands' dtype is another."""

# fmt: off
MOVES = frozenset((
    "broadcast_in_dim", "concatenate", "expand_dims", "iota", "pad", "reshape", "rev", "slice",
    "split", "squeeze", "transpose",
))
# fmt: on
"""Operations that put numbers elsewhere, and compute nothing."""
