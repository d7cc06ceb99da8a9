"""The words of a finding, as the users of each framework write them.

Texts are written in PyTorch's words. A row below has a phrase of theirs, and what stands in its
place in each other framework. TensorPlay has PyTorch's names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from gradscaler.diagnose._record.finding import Finding

_FRAMEWORKS = "paddle", "jax", "keras", "tf_keras", "mindspore"
_ANEW = "begin each step with new gradients"
_NO_MODE = "call the model with training=True in each step"
_CAST_LAYER = 'dtype="float32" in its layer'
_JAX_32, _KERAS_32 = ".astype(jnp.float32)", 'keras.ops.cast(x, "float32")'
_TF_32, _MS_32 = "tf.cast(x, tf.float32)", "ops.cast(x, mindspore.float32)"
_NO_SLOPE = ("detach()", "jax.lax.stop_gradient()", "keras.ops.stop_gradient()")
_STOPS = (*_NO_SLOPE, "tf.stop_gradient()", "ops.stop_gradient()")
_FREEZE = (
    "set stop_gradient = True",
    "leave them out of what is differentiated",
    "set trainable = False",
    "set trainable = False",
    "set requires_grad = False",
)
_OWN_LOOP = "Scale the loss by the scaler before its gradients are taken"

_COMPILED = (
    "compiled code is one operation here: watch such a step (gradscaler run --watch), or run some "
    'uncompiled, by torch.compiler.set_stance("force_eager")'
)
_UNCOMPILED = "compiled code is one operation here: run some steps uncompiled"

# A phrase, and what Paddle, JAX, Keras, tf_keras and MindSpore say.
_ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Code outside of the model",  # in JAX, there may be none
        ("Code outside of the model", "Code of the step", *("Code outside of the model",) * 3),
    ),
    # Steps and gradients.
    (
        "Call optimizer.zero_grad() after each step",
        (
            "Call optimizer.clear_grad() after each step",
            _ANEW.capitalize(),
            f"{_ANEW.capitalize()} (self.zero_grad() on PyTorch)",
            *(_ANEW.capitalize(),) * 2,
        ),
    ),
    (
        "Call optimizer.zero_grad() also where",
        (
            "Call optimizer.clear_grad() also where",
            *(f"{_ANEW.capitalize()} also where",) * 4,
        ),
    ),
    (
        "call zero_grad() before the backward pass",
        ("call clear_grad() before the backward pass", *(_ANEW,) * 4),
    ),
    (
        "zero_grad() between backward() and step(), ",
        ("clear_grad() between backward() and step(), ", *("gradients that are set to 0, ",) * 4),
    ),
    (
        "Call step() with the optimizer that holds it, or give it to one",
        (
            "Call step() with the optimizer that holds it, or give it to one",
            *("Give it to the optimizer",) * 4,
        ),
    ),
    (
        "clip gradients before optimizer.step()",
        (
            "clip gradients (grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))",
            "clip gradients (optax.clip_by_global_norm())",
            "clip gradients (global_clipnorm=)",
            "clip gradients (global_clipnorm=)",
            "clip gradients (ops.clip_by_global_norm())",
        ),
    ),
    (
        "optimizer.step()",
        (
            "optimizer.step()",
            "optax.apply_updates()",
            "optimizer.apply()",
            "optimizer.apply_gradients()",
            "optimizer(gradients)",
        ),
    ),
    (
        "Call loss.backward() and step() of an optimizer of torch.optim that holds the model's "
        "parameters",
        (
            "Call loss.backward() and step() of an optimizer of paddle.optimizer that holds the "
            "model's parameters",
            *("Train by an optimizer that holds the model's parameters",) * 4,
        ),
    ),
    (
        "Call scaler.scale(loss).backward() in place of loss.backward()",
        (
            "Call scaler.scale(loss).backward() in place of loss.backward()",
            *(_OWN_LOOP,) * 4,
        ),
    ),
    (
        "scaler.scale(first).backward() and scaler.scale(second).backward()",
        (
            "scaler.scale(first).backward() and scaler.scale(second).backward()",
            *("each before its gradients are taken",) * 4,
        ),
    ),
    (
        "autograd.grad(scaler.scale(loss), ...) by 1 / scaler.get_scale()",
        (
            "paddle.grad(scaler.scale(loss), ...) by 1 / the loss scale",
            *("the scaled loss by 1 / the loss scale",) * 4,
        ),
    ),
    ("growth_interval", ("incr_every_n_steps", *("the growth interval",) * 4)),
    (
        "scheduler.step()",
        ("scheduler.step()", *("the schedule",) * 4),
    ),
    (
        "Call scaler.unscale_(optimizer) after the backward pass, before",
        (
            "Call scaler.unscale_(optimizer) after the backward pass, before",
            *("Divide them by the loss scale before",) * 2,
            "Call optimizer.get_unscaled_gradients(gradients) before",
            "Call gradients = scaler.unscale(gradients) before",
        ),
    ),
    (
        "skip each step whose gradients are not",
        (
            *("skip each step whose gradients are not",) * 4,
            "call optimizer(gradients) only if amp.all_finite(gradients)",
        ),
    ),
    # Dtypes.
    (
        "under torch.autocast(device, dtype=torch.float16)",
        (
            'under paddle.amp.auto_cast(dtype="float16")',
            "in float16 (.astype(jnp.float16))",
            'under keras.mixed_precision.set_dtype_policy("mixed_float16")',
            'under tf_keras.mixed_precision.set_global_policy("mixed_float16")',
            "in float16 (to_float(mindspore.float16) of the Cell)",
        ),
    ),
    (
        "train in bfloat16 (torch.autocast(device, dtype=torch.bfloat16))",
        (
            'train in bfloat16 (paddle.amp.auto_cast(dtype="bfloat16"))',
            "train in bfloat16 (.astype(jnp.bfloat16))",
            'train in bfloat16 (the policy "mixed_bfloat16")',
            'train in bfloat16 (the policy "mixed_bfloat16")',
            "train in bfloat16 (to_float(mindspore.bfloat16))",
        ),
    ),
    *(
        (
            f"run autocast with dtype=torch.{dtype}",
            (
                f'run paddle.amp.auto_cast(dtype="{dtype}")',
                f"compute in {dtype} (.astype(jnp.{dtype}))",
                f'take the policy "mixed_{dtype}"',
                f'take the policy "mixed_{dtype}"',
                f"compute in {dtype} (to_float(mindspore.{dtype}))",
            ),
        )
        for dtype in ("float16", "bfloat16")
    ),
    (
        "(dtype=torch.float32)",
        ('(x.astype("float32"))', f"({_JAX_32})", f"({_KERAS_32})", f"({_TF_32})", f"({_MS_32})"),
    ),
    *(
        (
            f"({name}.float())",
            (
                f'({name}.astype("float32"))',
                f"({name}.astype(jnp.float32))",
                f'(keras.ops.cast({name}, "float32"))',
                f"(tf.cast({name}, tf.float32))",
                f"(ops.cast({name}, mindspore.float32))",
            ),
        )
        for name in ("x", "outputs")
    ),
    (
        ", with the forward pass under autocast",
        (
            ", with the forward pass under paddle.amp.auto_cast()",
            ", and cast them in the forward pass (.astype(jnp.float16))",
            ', under the policy "mixed_float16"',
            ', under the policy "mixed_float16"',
            ", with the forward pass in float16 (to_float())",
        ),
    ),
    (
        "or step them by gradscaler.torch.MasterWeights",
        (
            "or give the optimizer multi_precision=True",
            "or step them by gradscaler.jax.master_weights",
            "or update them in float32",
            "or update them in float32",
            "or update them in float32",
        ),
    ),
    *(
        (
            f"{before}autocast(enabled=False)",
            (
                f"{before}paddle.amp.auto_cast(enable=False)",
                _JAX_32,
                _CAST_LAYER,
                _CAST_LAYER,
                _MS_32,
            ),
        )
        for before in ("under ", "")
    ),
    # Scalers.
    ("GradScaler(group=...)", ("GradScaler(group=...)", *("a scaler with a group",) * 4)),
    (
        "Scale the loss by a GradScaler (a disabled one, as PyTorch's is without CUDA, scales "
        "nothing)",
        (
            "Scale the loss by a GradScaler (a disabled one, as Paddle's is on a CPU, scales "
            "nothing)",
            "Scale the loss by a loss scaler",
            "Wrap the optimizer in a LossScaleOptimizer",
            "Wrap the optimizer in a LossScaleOptimizer",
            "Scale the loss by a DynamicLossScaler",
        ),
    ),
    (
        "a GradScaler",
        (
            "a GradScaler",
            "a loss scaler",
            "a LossScaleOptimizer",
            "a LossScaleOptimizer",
            "a DynamicLossScaler",
        ),
    ),
    (
        "init_scale",
        ("init_loss_scaling", "init_scale", "initial_scale", "initial_scale", "scale_value"),
    ),
    ("enabled=False", ("enable=False", *("in its place, none",) * 4)),
    ("scaler.state_dict()", ("scaler.state_dict()", *("the scaler's state",) * 4)),
    (
        ", in Keras by optimizer.loss_scale before apply()",
        ("", "", ", by optimizer.loss_scale before apply()", ", by optimizer.loss_scale", ""),
    ),
    # Graphs.
    ("(svdvals)", ("(paddle.linalg.svdvals)", "(jnp.linalg.svdvals)", *("without vectors",) * 3)),
    (
        "() - x).detach()",
        ("() - x).detach()", *(f"() - x), the difference in {stop}" for stop in _STOPS[1:])),
    ),
    (
        "detach(), .data, .item(), numpy(), torch.tensor()",
        (
            "detach(), .item(), numpy(), paddle.to_tensor()",
            "jax.lax.stop_gradient(), numpy",
            "keras.ops.stop_gradient(), keras.ops.convert_to_numpy()",
            "tf.stop_gradient(), numpy(), tf.constant()",
            "ops.stop_gradient(), asnumpy()",
        ),
    ),
    (
        "detach(), .data, item() or no_grad()",
        (
            "detach(), item() or no_grad()",
            "jax.lax.stop_gradient()",
            "keras.ops.stop_gradient()",
            "tf.stop_gradient()",
            "ops.stop_gradient() or asnumpy()",
        ),
    ),
    (
        "item(), numpy() or detach()",
        ("item(), numpy() or detach()", *_STOPS[1:]),
    ),
    ("detach()", _STOPS),
    *(
        (f"call requires_grad_(False) on {them}", (f"{_FREEZE[0]} on {them}", *_FREEZE[1:]))
        for them in ("them", "those", "it")
    ),
    (
        "pass use_reentrant=False to checkpoint(), or call requires_grad_(True) on its input "
        "(enable_input_require_grads())",
        (
            "set stop_gradient = False on the input of recompute()",
            *("look at what is computed again in the backward pass",) * 4,
        ),
    ),
    (
        "nn.ModuleList or nn.ModuleDict, parameters in nn.ParameterList",
        (
            "paddle.nn.LayerList or paddle.nn.LayerDict, parameters in paddle.nn.ParameterList",
            "what is differentiated, as a pytree",
            "attributes of the model",
            "attributes of the model",
            "mindspore.nn.CellList, parameters in mindspore.ParameterTuple",
        ),
    ),
    ("model.parameters()", ("model.parameters()", *("its list of parameters",) * 4)),
    (
        "squeeze(-1) those of shape [n, 1], or unsqueeze(-1) the others",
        (
            "squeeze(-1) those of shape [n, 1], or unsqueeze(-1) the others",
            *("take [:, 0] of those of shape [n, 1], or [:, None] of the others",) * 3,
            "squeeze(-1) those of shape [n, 1], or unsqueeze(-1) the others",
        ),
    ),
    ("squeeze(-1)", ("squeeze(-1)",) * 5),
    ("load_state_dict()", ("set_state_dict()", *("weights that are loaded",) * 4)),
    # Modes.
    (
        "Call model.train() after each validation, before the next batch. To keep some layers in "
        "evaluation mode, call eval() on those alone",
        (
            "Call model.train() after each validation, before the next batch. To keep some layers "
            "in evaluation mode, call eval() on those alone",
            *(_NO_MODE.capitalize(),) * 3,
            "Call model.set_train() after each validation, before the next batch",
        ),
    ),
    (
        "a reentrant checkpoint hides its operations: pass use_reentrant=False, which shows them",
        ("what is computed again hides its operations",) * 5,
    ),
    # Functions, and their parameters.
    (
        "take logits (cross_entropy, log_softmax, logsigmoid)",
        (
            "take logits (cross_entropy, log_softmax, log_sigmoid)",
            "take logits (optax.softmax_cross_entropy, jax.nn.log_softmax, jax.nn.log_sigmoid)",
            "take logits (from_logits=True, keras.ops.log_softmax, keras.ops.log_sigmoid)",
            "take logits (from_logits=True, tf.nn.log_softmax, tf.math.log_sigmoid)",
            "take logits (ops.cross_entropy, ops.log_softmax, ops.logsigmoid)",
        ),
    ),
    (
        "take logits (binary_cross_entropy_with_logits)",
        (
            "take logits (binary_cross_entropy_with_logits)",
            "take logits (optax.sigmoid_binary_cross_entropy)",
            "take logits (from_logits=True)",
            "take logits (from_logits=True)",
            "take logits (ops.binary_cross_entropy_with_logits)",
        ),
    ),
    (
        "(use kl_div or xlogy)",
        (
            "(use kl_div)",
            "(use jax.scipy.special.xlogy)",
            "(use keras.losses.kl_divergence)",
            "(use tf.math.xlogy)",
            "(use ops.kl_div or ops.xlogy)",
        ),
    ),
    (
        "set zero_infinity=True, or leave such samples out",
        (*("leave such samples out",) * 4, "set zero_infinity=True, or leave such samples out"),
    ),
    (
        "set correction=0",
        ("set unbiased=False", "set ddof=0", *("divide by their number",) * 2, "set ddof=0"),
    ),
    (
        "a larger rtol",
        ("a larger rcond", *("a larger rtol",) * 2, "a larger rcond", "a larger rtol"),
    ),
    (
        "pass a larger one (eps=1e-2)",
        ("pass a larger one (epsilon=1e-2)", *("take a larger one",) * 3, "take a larger one"),
    ),
    (
        "lower eps;",
        ("lower epsilon;", "lower eps;", "lower epsilon;", "lower epsilon;", "lower its eps;"),
    ),
    ("pass eps=1e-4", ("pass eps=1e-4", "pass epsilon=1e-4", *("add 1e-4 to its norm",) * 3)),
    (
        "torch.sqrt((x * x).sum(-1) + 1e-6)",
        (
            "paddle.sqrt((x * x).sum(-1) + 1e-6)",
            "jnp.sqrt((x * x).sum(-1) + 1e-6)",
            "keras.ops.sqrt(keras.ops.sum(x * x, -1) + 1e-6)",
            "tf.sqrt(tf.reduce_sum(x * x, -1) + 1e-6)",
            "ops.sqrt((x * x).sum(-1) + 1e-6)",
        ),
    ),
    (
        "torch.sqrt(x.var() + 1e-6)",
        (
            "paddle.sqrt(x.var() + 1e-6)",
            "jnp.sqrt(x.var() + 1e-6)",
            "keras.ops.sqrt(keras.ops.var(x) + 1e-6)",
            "tf.sqrt(tf.math.reduce_variance(x) + 1e-6)",
            "ops.sqrt(x.var() + 1e-6)",
        ),
    ),
    (
        "masked_fill()",
        (
            "masked_fill()",
            "jnp.where()",
            "keras.ops.where()",
            "tf.where()",
            "masked_fill()",
        ),
    ),
    (
        "torch.special.i0e, i1e",
        (
            "paddle.i0e, i1e",
            "jax.scipy.special.i0e, i1e",
            "i0e, i1e",
            "tf.math.bessel_i0e, bessel_i1e",
            "ops.bessel_i0e, bessel_i1e",
        ),
    ),
    (_COMPILED, (_UNCOMPILED,) * 5),
)
PHRASES = dict(_ROWS)


@cache
def _phrases_of(framework: str) -> tuple[re.Pattern[str], dict[str, str]] | None:
    """What finds the phrases that a framework says otherwise, and what it says."""
    if framework not in _FRAMEWORKS:
        return None
    place = _FRAMEWORKS.index(framework)
    phrases = {
        phrase: others[place] for phrase, others in PHRASES.items() if others[place] != phrase
    }
    longest_first = sorted(phrases, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))), phrases


def in_words_of(framework: str, finding: Finding) -> Finding:
    """A finding in the words of a framework, by its name in a run file."""
    cause, action = (text_for(framework, each) for each in (finding.cause, finding.action))
    return replace(finding, cause=cause, action=action)


def text_for(framework: str, text: str) -> str:
    """A text in the words of a framework.

    >>> text_for("paddle", "Call optimizer.zero_grad() after each step")
    'Call optimizer.clear_grad() after each step'
    """
    if framework == "torch":
        return text
    if framework == "tensorplay":
        return text.replace(_COMPILED, _UNCOMPILED).replace("torch.", "tensorplay.")
    found = _phrases_of(framework)
    if found is None:
        return text
    pattern, phrases = found
    return pattern.sub(lambda match: phrases[match[0]], text)
