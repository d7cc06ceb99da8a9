"""The table of operations: a row has all that is known of one, in every framework.

Names are exact. Those in lower case are PyTorch's, TensorPlay's, Paddle's and JAX's; those of
TensorFlow and MindSpore begin with a capital.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gradscaler.diagnose._operations import repairs as to
from gradscaler.diagnose._operations.operation import At, Operation, Repair, Role

_BELOW_0, _BELOW_1, _ABOVE_1 = (-math.inf, 0.0), (-math.inf, 1.0), (1.0, math.inf)
_BELOW_MINUS_1 = (-math.inf, -1.0)
_OUTSIDE: tuple[At, ...] = (_BELOW_MINUS_1, _ABOVE_1)
_ENDS: tuple[At, ...] = (-1.0, 1.0)
_NOT_IN_UNIT: tuple[At, ...] = (_BELOW_0, 0.0, 1.0, _ABOVE_1)
_POLES_OF_GAMMA = 0.0, -1.0, -2.0, -3.0  # and so on, where few trainings come
_BITS = {"float16": 16.0, "bfloat16": 128.0, "float32": 128.0, "float64": 1024.0}
_LOGARITHMS = {dtype: bits * math.log(2) for dtype, bits in _BITS.items()}
_OF_TWICE = {dtype: (bits + 1) * math.log(2) for dtype, bits in _BITS.items()}

# Those of a loss of classes.
_OF_CLASSES = to.FAR_APART, to.TOO_LARGE, to.ALL_MASKED, to.MEAN_OF_NONE, to.MASKED_CLASS


def _each(
    names: str, roles: tuple[Role, ...] = (), both: tuple[Repair, ...] = (), **facts: Any
) -> Iterator[Operation]:
    """The rows of operations that share their facts.

    Args:
        names: of each, its name and its other names, and a comma before the next.
        roles: what they do.
        both: the repairs of the result and of the slope.
        facts: other fields of the rows.
    """
    facts = {"of_value": both, "of_slope": both, **facts}
    for own in names.split(", "):
        name, *also = own.split()
        yield Operation(name, tuple(also), roles=frozenset(roles), **facts)


OPERATIONS = (
    # Logarithms, and what has one in it.
    *_each(
        "log Log InplaceLog, log2 Log2, log10 Log10",
        bad_at=(_BELOW_0, 0.0),
        steep_at=(0.0,),
        of_value=(to.LOG_OF_0, to.LOG_OF_NEGATIVE, to.LOG),
        of_slope=(to.LOG_SLOPE,),
    ),
    *_each(
        "log1p special_log1p Log1p",
        bad_at=(_BELOW_MINUS_1, -1.0),
        steep_at=(-1.0,),
        of_value=(to.LOG1P,),
        of_slope=(to.LOG1P_SLOPE,),
    ),
    *_each(
        "xlogy special_xlogy Xlogy XLogYScalarOther XLogYScalarSelf",
        bad_at=(_BELOW_0, 0.0),
        steep_at=(0.0,),
        of_value=(to.XLOGY,),
        of_slope=(to.LOG_SLOPE,),
    ),
    *_each(
        "special_xlog1py special_xlog1_py xlog1py Xlog1py",
        bad_at=(_BELOW_MINUS_1, -1.0),
        steep_at=(-1.0,),
        of_value=(to.LOG1P,),
        of_slope=(to.LOG1P_SLOPE,),
    ),
    *_each(
        "logit special_logit Logit",
        bad_at=_NOT_IN_UNIT,
        steep_at=_NOT_IN_UNIT,
        of_value=(to.OPEN_UNIT,),
        of_slope=(to.LOGIT,),
    ),
    *_each(
        "special_ndtri ndtri Ndtri",
        bad_at=_NOT_IN_UNIT,
        steep_at=_NOT_IN_UNIT,
        both=(to.OPEN_UNIT,),
    ),
    *_each(
        "special_entr entr",
        bad_at=(_BELOW_0,),
        steep_at=(_BELOW_0, 0.0),
        of_value=(to.ENTROPY,),
        of_slope=(to.LOG_SLOPE,),
    ),
    *_each("special_log_ndtr log_ndtr", of_slope=(to.LOG_NDTR,)),
    # Roots and powers.
    *_each(
        "sqrt Sqrt",
        bad_at=(_BELOW_0,),
        steep_at=(_BELOW_0, 0.0),
        of_value=(to.ROOT_OF_NEGATIVE,),
        of_slope=(to.ROOT_SLOPE,),
    ),
    *_each(
        "rsqrt Rsqrt",
        bad_at=(_BELOW_0, 0.0),
        steep_at=(_BELOW_0, 0.0),
        roles=(Role.DIVIDES,),
        of_value=(to.RSQRT_OF_NEGATIVE, to.RSQRT),
        of_slope=(to.RSQRT,),
    ),
    *_each("cbrt", steep_at=(0.0,), of_slope=(to.ROOT_SLOPE,)),  # JAX's
    *_each(
        "hypot Hypot", steep_at=(0.0,), of_value=(to.SQUARES,), of_slope=(to.NORM_SLOPE,)
    ),  # where both are 0
    *_each(
        "norm vector_norm linalg_vector_norm linalg_norm dist p_norm frobenius_norm EuclideanNorm "
        "Norm LinalgVectorNorm LpNorm LpNormV2, cdist euclidean_dist Cdist, pdist Pdist",
        roles=(Role.RISKY,),
        of_value=(to.SQUARES,),
        of_slope=(to.NORM_SLOPE,),
    ),
    *_each(
        "pow rpow ipow float_power integer_pow elementwise_pow Pow PowScalarTensor PowTensorScalar",
        bad_at=(0.0,),  # if the exponent is negative
        steep_at=(0.0,),  # if it is below 1
        of_value=(
            to.POWER_OF_NEGATIVE,
            to.POWER_OF_0,
            to.POWER,
            to.HIGH_POWER,
            to.POWER_OR_0,
        ),
        of_slope=(to.POWER_SLOPE,),
    ),
    *_each("square Square", of_value=(to.SQUARE,)),
    # Exponentials.
    *_each(
        "exp Exp InplaceExp, expm1 special_expm1 Expm1",
        largest=_LOGARITHMS,
        roles=(Role.EXPONENTIATES,),
        both=(to.EXP_IN_FLOAT16, to.EXP),
    ),
    *_each(
        "exp2 special_exp2 Exp2",
        largest=_BITS,
        roles=(Role.EXPONENTIATES,),
        both=(to.EXP2_IN_FLOAT16, to.EXP2),
    ),
    *_each("sinh Sinh, cosh Cosh", largest=_OF_TWICE, both=(to.OF_EXPONENTIALS,)),
    *_each(
        "i0 special_i0 special_modified_bessel_i0 BesselI0, special_i1 i1 "
        "special_modified_bessel_i1 BesselI1",
        largest={dtype: _LOGARITHMS[dtype] for dtype in ("float32", "float64")},
        both=(to.SCALED_BESSEL,),
    ),
    *_each("special_erfcx erfcx", both=(to.OF_SQUARES,)),
    *_each("soft_margin_loss SoftMarginLoss", both=(to.EXP_IN_FLOAT16, to.EXP)),
    *_each("softplus Softplus", both=(to.THRESHOLD,)),
    *_each("linalg_matrix_exp matrix_exp MatrixExp", both=(to.MATRIX_EXP,)),
    # Quotients.
    *_each(
        "div divide true_divide truediv itruediv rtruediv idiv rdiv div_scale Div Divs RealDiv",
        bad_at=(0.0,),
        steep_at=(0.0,),
        roles=(Role.DIVIDES,),
        of_value=(to.QUOTIENT, to.ZERO_BY_0, to.DIVISION),
        of_slope=(to.DIVISION,),
    ),
    *_each(
        "reciprocal Reciprocal Inv, addcdiv Addcdiv",
        bad_at=(0.0,),
        steep_at=(0.0,),
        roles=(Role.DIVIDES,),
        both=(to.DIVISION,),
    ),
    *_each(
        "remainder mod rmod imod FloorMod, fmod rem",
        bad_at=(0.0,),
        steep_at=(0.0,),
        both=(to.DIVISION,),
    ),
    *_each(
        "floor_divide floordiv rfloordiv ifloordiv FloorDiv", bad_at=(0.0,), of_value=(to.DIVISION,)
    ),
    *_each("normalize L2Normalize", of_value=(to.DIVISION,)),
    *_each("cosine_similarity", both=(to.DIRECTION,)),
    *_each("weight_norm", roles=(Role.RISKY,), of_value=(to.WEIGHT_NORM,)),
    *_each(
        "layer_norm LayerNorm LayerNormExt LayerNormV3, group_norm GroupNorm, instance_norm "
        "InstanceNorm InstanceNormV2",
        roles=(Role.RISKY,),
        of_value=(to.EQUAL_NUMBERS,),
    ),
    *_each(
        "batch_norm batch_norm_legit batch_norm_legit_no_training batch_norm_with_update "
        "batch_norm_no_update BatchNorm BatchNormExt FusedBatchNorm FusedBatchNormV3, rms_norm "
        "RmsNorm",
        roles=(Role.RISKY,),
    ),
    *_each(
        "std reduce_std Std ReduceStd, std_mean StdMean",
        of_value=(to.DEVIATION_OF_ONE,),
        of_slope=(to.DEVIATION_SLOPE,),
    ),
    *_each("var reduce_variance Var, var_mean VarMean", of_value=(to.DEVIATION_OF_ONE,)),
    # Angles, and other functions of a range.
    *_each(
        "acos arccos Acos ACos AcosExt, asin arcsin Asin AsinExt",
        bad_at=_OUTSIDE,
        steep_at=(*_OUTSIDE, *_ENDS),
        of_value=(to.NO_COSINE, to.ANGLE),
        of_slope=(to.ANGLE_SLOPE,),
    ),
    *_each(
        "acosh arccosh Acosh AcoshExt",
        bad_at=(_BELOW_1,),
        steep_at=((-1.0, 1.0), *_ENDS),
        both=(to.ACOSH,),
    ),
    *_each("atanh arctanh Atanh", bad_at=(*_OUTSIDE, *_ENDS), steep_at=_ENDS, both=(to.ATANH,)),
    *_each(
        "erfinv special_erfinv erf_inv Erfinv InplaceErfinv",
        bad_at=(*_OUTSIDE, *_ENDS),
        steep_at=(*_OUTSIDE, *_ENDS),
        both=(to.ATANH,),
    ),
    # In other frameworks than PyTorch, TensorPlay and Paddle, its slope is NaN where both are 0.
    *_each("atan2 arctan2 Atan2", of_slope=(to.BOTH_0,)),
    *_each("tan Tan", of_slope=(to.TAN_SLOPE,)),
    *_each(
        "lgamma special_gammaln gammaln Lgamma",
        bad_at=_POLES_OF_GAMMA,
        steep_at=_POLES_OF_GAMMA,
        of_value=(to.LGAMMA_IN_FLOAT16, to.GAMMA),
        of_slope=(to.GAMMA_SLOPE,),
    ),
    *_each(
        "special_zeta zeta Zeta",  # of its second argument
        bad_at=_POLES_OF_GAMMA,
        steep_at=_POLES_OF_GAMMA,
        both=(to.ZETA,),
    ),
    *_each(
        "special_modified_bessel_k0 BesselK0, special_modified_bessel_k1 BesselK1, "
        "special_scaled_modified_bessel_k0 BesselK0e, special_scaled_modified_bessel_k1 BesselK1e, "
        "special_bessel_y0 BesselY0, special_bessel_y1 BesselY1",
        bad_at=(_BELOW_0, 0.0),
        both=(to.BESSEL_AT_0,),
    ),
    *_each(
        "betainc regularized_incomplete_beta Betainc",  # JAX's, TensorFlow's
        bad_at=(_BELOW_0, _ABOVE_1),
        steep_at=(_BELOW_0, 0.0, 1.0, _ABOVE_1),  # if the other arguments are below 1
        both=(to.INCOMPLETE_BETA,),
    ),
    *_each(
        "digamma special_digamma special_psi Digamma",
        bad_at=_POLES_OF_GAMMA,
        steep_at=(0.0,),
        of_value=(to.GAMMA,),
        of_slope=(to.GAMMA_SLOPE,),
    ),
    *_each(
        "polygamma special_polygamma Polygamma",
        bad_at=(0.0,),
        steep_at=_POLES_OF_GAMMA,
        of_value=(to.GAMMA,),
        of_slope=(to.GAMMA_SLOPE,),
    ),
    *_each("mvlgamma special_multigammaln Mvlgamma", both=(to.GAMMA_OF_MATRIX,)),
    *_each(
        "igamma special_gammainc gammainc Igamma, igammac special_gammaincc gammaincc Igammac",
        bad_at=(_BELOW_0,),
        steep_at=(_BELOW_0, 0.0),  # if the first argument is at most 1
        both=(to.INCOMPLETE_GAMMA,),
    ),
    # Sums, means and products of many.
    *_each("add iadd radd add_any bias_add Add AddV2 AddExt BiasAdd", roles=(Role.ADDS,)),
    *_each("sub subtract isub rsub Sub SubExt", roles=(Role.ADDS,)),
    *_each(
        "sum reduce_sum add_n Sum ReduceSum SumExt AddN, nansum Nansum, "
        "cumsum Cumsum CumSum CumsumExt, reduce_window_sum",
        roles=(Role.ADDS_UP,),
        of_value=(to.SUM,),
    ),
    *_each(
        "index_add IndexAdd IndexAddExt, scatter_add scatter-add "
        "scatter_nd_add ScatterAdd ScatterAddExt TensorScatterAdd",
        roles=(Role.ADDS_UP,),
        of_value=(to.SUM_OF_PARTS,),
    ),
    *_each("mean mean_all Mean ReduceMean MeanExt, nanmean", of_value=(to.MEAN_OF_NONE, to.SUM)),
    *_each("median Median, nanmedian", of_value=(to.MEDIAN_OF_NONE,)),
    *_each(
        "matmul imatmul rmatmul linear addbmm addmm addmv baddbmm bmm dot mm mv dot_general "
        "ragged_dot_general MatMul MatMulExt BatchMatMul BatchMatMulExt BatchMatMulV2 "
        "BatchMatMulV3 Addbmm Addmm Addmv Baddbmm Dense",
        roles=(Role.ADDS_UP,),
        of_value=(to.LINEAR_IN_FLOAT32, to.GROWS, to.MATMUL),
    ),
    *_each(
        "einsum Einsum EinsumExt, tensordot, bilinear trilinear, linalg_multi_dot multi_dot",
        roles=(Role.ADDS_UP,),
        of_value=(to.MATMUL,),
    ),
    *_each(
        "conv convolution slow_conv2d slow_conv3d slow_conv_dilated2d slow_conv_dilated3d "
        "convolution_transpose depthwise_convolution mps_convolution convolution_overrideable "
        "conv_general_dilated Convolution, conv1d Conv1DExt, conv2d depthwise_conv2d "
        "conv_depthwise2d Conv2D Conv2DExt DepthwiseConv2dNative, conv3d conv_depthwise3d Conv3D "
        "Conv3DExt, conv_transpose1d, conv_transpose2d conv2d_transpose slow_conv_transpose2d "
        "Conv2DTranspose, conv_transpose3d conv3d_transpose slow_conv_transpose3d Conv3DTranspose",
        roles=(Role.ADDS_UP,),
    ),
    *_each("mul multiply imul rmul scale Mul Muls", of_value=(to.PRODUCT, to.FACTOR)),
    *_each(
        "prod reduce_prod Prod ReduceProd ProdExt, cumprod Cumprod CumProd",
        both=(to.PRODUCT_OF_MANY,),
    ),
    # Masks, and losses of classes.
    *_each(
        "softmax safe_softmax masked_softmax sparse_softmax Softmax",
        roles=(Role.TAKES_MASKS, Role.RISKY, Role.SATURATES, Role.MAKES_PROBABILITIES),
        both=(to.MASKED,),
    ),
    *_each(
        "log_softmax sparse_log_softmax LogSoftmax LogSoftmaxExt",
        roles=(Role.TAKES_MASKS, Role.RISKY, Role.TAKES_LOGITS),
        of_value=(to.FAR_APART, to.MASKED),
        of_slope=(to.MASKED,),
    ),
    *_each(
        "logsumexp special_logsumexp LogSumExp, softmin, gumbel_softmax, "
        "scaled_dot_product_attention scaled_dot_product_attention_math "
        "scaled_dot_product_flash_attention scaled_dot_product_efficient_attention "
        "scaled_dot_product_cudnn_attention scaled_dot_product_fused_attention_overrideable "
        "flash_attention flash_attn efficient_attention memory_efficient_attention attention "
        "FlashAttentionScore",
        roles=(Role.TAKES_MASKS, Role.RISKY),
        both=(to.MASKED,),
    ),
    *_each("multi_head_attention", roles=(Role.TAKES_MASKS,)),
    *_each(
        "logcumsumexp cumlogsumexp CumulativeLogsumexp, logaddexp LogAddExp, logaddexp2 LogAddExp2",
        of_slope=(to.MASKED_SUMS,),
    ),
    *_each(
        "nll_loss nll_loss2d nll_loss_nd NLLLoss NLLLoss2d",
        roles=(Role.NEVER_NEGATIVE,),
        of_value=_OF_CLASSES,
    ),
    *_each(
        "cross_entropy cross_entropy_loss cross_entropy_with_softmax CrossEntropyLoss "
        "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
        of_value=_OF_CLASSES,
    ),
    *_each("ctc_loss warpctc CTCLoss CTCLossV2", both=(to.ALIGNMENT,)),
    *_each(
        "binary_cross_entropy bce_loss BinaryCrossEntropy",
        roles=(Role.NEVER_NEGATIVE,),
        of_slope=(to.PROBABILITIES,),
    ),
    *_each(
        "binary_cross_entropy_with_logits sigmoid_cross_entropy_with_logits BCEWithLogitsLoss "
        "SigmoidCrossEntropyWithLogits",
        roles=(Role.NEVER_NEGATIVE, Role.TAKES_LOGITS),
    ),
    *_each("kl_div kldiv_loss tp_kl_div KLDiv KLDivLoss", of_value=(to.PROBABILITIES_TO_KL,)),
    *_each("gaussian_nll_loss", both=(to.VARIANCE,)),
    *_each("poisson_nll_loss tp_poisson_nll_loss", both=(to.LOG_RATE,)),
    *_each(
        "mse_loss MSELossExt, huber_loss, smooth_l1_loss SmoothL1Loss",
        roles=(Role.COMPARES,),
    ),
    # Matrices.
    *_each("logdet", roles=(Role.RISKY,), of_value=(to.DETERMINANT,), of_slope=(to.SINGULAR,)),
    *_each(
        "linalg_slogdet slogdet slogdet_v2 LogMatrixDeterminant",
        roles=(Role.RISKY,),
        of_value=(to.DETERMINANT,),
        of_slope=(to.SINGULAR,),
    ),
    *_each(
        "linalg_cholesky linalg_cholesky_ex cholesky Cholesky",
        roles=(Role.SOLVES,),
        both=(to.NOT_DEFINITE,),
    ),
    *_each(
        "linalg_inv linalg_inv_ex inverse inv MatrixInverse MatrixInverseExt, linalg_solve "
        "linalg_solve_ex solve MatrixSolve, linalg_solve_triangular triangular_solve "
        "MatrixTriangularSolve SolveTriangular TriangularSolve, cholesky_solve CholeskySolve, "
        "cholesky_inverse CholeskyInverse, linalg_cond",
        both=(to.SINGULAR,),
    ),
    *_each(
        "linalg_lu_factor linalg_lu_factor_ex lu_factor lu_with_info, linalg_lu lu Lu",
        roles=(Role.SOLVES,),
        of_slope=(to.SINGULAR,),
    ),
    *_each("linalg_pinv pinv pinverse", both=(to.CUTOFF,)),
    *_each("linalg_svd svd Svd", roles=(Role.SOLVES,), of_slope=(to.SINGULAR_VECTORS,)),
    *_each(
        "linalg_eig eig Eig, linalg_eigh eigh Eigh SelfAdjointEig SelfAdjointEigV2",
        roles=(Role.SOLVES,),
        of_slope=(to.EIGENVECTORS,),
    ),
    *_each("linalg_qr qr Qr LinalgQr", roles=(Role.SOLVES,), of_slope=(to.DEPENDENT,)),
    # What casts, writes and moves.
    *_each(
        "to to_copy bfloat16 double float half type astype convert_element_type cast Cast",
        roles=(Role.MOVES,),
        of_value=(to.CAST,),
        spoken="casting",
    ),
    *_each("copy setitem setitem_dygraph set_value Copy", of_value=(to.CAST_BY_COPY, to.WRITTEN)),
    *_each(
        "fill Fill FillV2, fill_diagonal FillDiagonal, masked_fill MaskedFill, index_put IndexPut",
        roles=(Role.FILLS,),
        of_value=(to.WRITTEN,),
    ),
    *_each(
        "index_fill IndexFill, where select_n Select SelectV2, scatter put_along_axis Scatter "
        "ScatterUpdate TensorScatterUpdate, scatter_reduce, masked_scatter MaskedScatter, "
        "slice_scatter, select_scatter, diagonal_scatter",
        roles=(Role.FILLS,),
    ),
    *_each(
        "t, transpose Transpose, permute, view View, unsafe_view, reshape reshape_alias "
        "reshape_copy Reshape, expand broadcast_in_dim BroadcastTo, clone Identity, slice Slice "
        "StridedSlice, select getitem getitem_dygraph, alias, squeeze Squeeze, unsqueeze "
        "ExpandDims",
        roles=(Role.MOVES,),
    ),
    *_each("gather", of_value=(to.OUT_OF_RANGE,)),  # JAX's
    *_each("stack Stack Pack, cat concat concatenate Concat ConcatV2", roles=(Role.STACKS,)),
    # What lets no gradient through.
    *_each("sign Sign, sgn, round Round, floor Floor, ceil Ceil, trunc Trunc", roles=(Role.STEPS,)),
    *_each("tanh Tanh, hardsigmoid HSigmoid", roles=(Role.SATURATES,)),
    *_each("sigmoid logistic Sigmoid", roles=(Role.SATURATES, Role.MAKES_PROBABILITIES)),
    *_each(
        "relu Relu ReLU, threshold Threshold, clamp clip ClipByValue ClampScalar ClampTensor, "
        "clamp_min, clamp_max, hardtanh Hardtanh, relu6 Relu6 ReLU6",
        roles=(Role.ENDS,),
    ),
    # What is finite, and has a finite slope, wherever its input is.
    *_each(
        "asinh arcsinh Asinh AsinhExt, atan arctan Atan AtanExt, linalg_det "
        "det MatrixDeterminant, log_sigmoid logsigmoid LogSigmoid, renorm embedding_renorm Renorm"
    ),
    # What hides operations, or is none.
    *_each("CompiledFunction", both=(to.COMPILED,)),
    *_each("CheckpointFunction", both=(to.CHECKPOINTED,)),
    *_each("hook", of_slope=(to.HOOK,), spoken="what a hook changed"),
)

_ROWS = {row.name: row for row in OPERATIONS}
_ROWS["astype"] = _ROWS["to"]  # as Paddle's is shown
_NAMES = {name: row.name for row in OPERATIONS for name in (row.name, *row.also)}


def row_of(name: str) -> Operation | None:
    """The row of an operation, by the name that users know; None if there is none.

    A function of the user's own may have another of its names, such as ``Softmax``.
    """
    return _ROWS.get(name)


def canonical(name: str) -> str:
    """The name that users know for an operation, from any of its names in a framework.

    >>> canonical("dot_general"), canonical("RealDiv"), canonical("my_own")
    ('matmul', 'div', 'my_own')
    """
    return _NAMES.get(name, name)


def names_with(role: Role) -> frozenset[str]:
    """The names that users know of the operations that have a role."""
    return frozenset(row.name for row in OPERATIONS if role in row.roles)


RISKY = names_with(Role.RISKY) | {row.name for row in OPERATIONS if row.bad_at or row.largest}
"""The operations that make Inf or NaN of finite numbers more often than others do."""
