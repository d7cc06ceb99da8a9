"""The thresholds of what a user is told, each with its reason, and with the case that set it.

Limits of time, memory and room stand where they hold.

A name in backticks is one of the trainings of the tests, or a test: its verdict is another one
without the threshold, or at twice or half of it.
"""

# Steps, calls and samples that are enough.
FEW_CALLS = 5  # calls, or steps that show them; fewer may be chance: `biases_before_batch_norms`
# Samples of the first 20 steps, as rewards that are rare come later: `rare_rewards`.
EARLY_SAMPLES = 4
# Steps whose losses are 0 from the start; rewards that are rare come later: `rare_rewards`.
ZERO_FROM_START = 20
# Samples that show the same, as what one shows may be in its batch alone. A training may have no
# more of them: `a_count_beyond_float16_divides_a_loss_term`.
FEW_SAMPLES = 2
# Steps; a warm-up begins with one or two at a rate of 0: `a_warm_up_that_is_never_stepped`.
FEW_STILL = 3
# Skips, streaks, or copies of a model onto itself; one bad batch does no harm in a longer run:
# `sparse_gradients`.
FEW_EVENTS = 3
# Skips one after the other whose losses are not finite, as no lower scale cures them; fewer may be
# bad batches side by side: `test_losses_that_are_bad_in_a_row_are_told_before_the_streak_is_long`.
BAD_IN_A_ROW = 5
SAME_FAILURES = 2  # failed steps: the first may be an accident, the second shows the same place
# Losses that are scaled, and no step of the scaler: `the_optimizer_steps_without_the_scaler`.
UNSTEPPED_LOSSES = 10
# Backward passes without a step, before each tenth of which a gradient held an Inf or NaN. A step
# may add up the gradients of many, and is left out, with new gradients, only after the last one.
STAYED_PASSES = 50
EMPTIED_SAMPLES = 2  # whose gradients were all set to 0; one may be a batch that a clip left out
# Backward passes of a step, of which all but the last lose their gradients, and samples of this in
# most steps. Gradients may be read before they are zeroed, as for the information of weights now
# and then: `zeroed_now_and_then`.
LEAST_ZEROED, ZEROED_SAMPLES = 3, 3
# Times the elements that losses before are made from: passes of single rows, whose gradients are
# read, and then one of the batch, of four rows at least: `of_single_rows`. Micro-batches are alike.
LARGER_PASS = 4.0
UNFED_SAMPLES = 4  # samples with a gradient of 0 for a weight, and with another for its bias
MANY = 0.25  # of the steps; a loop may err in one of a few: `a_step_after_each_micro_batch`
MOST = 0.75  # of the steps, as a schedule that ends too early has ended by then
ALMOST_ALL = 0.9  # of the steps; healthy loops do it now and then: `a_critic_that_steps_more_often`
# Of the parameters, or of their elements: `half_parameters`, `updates_below_half_an_ulp`.
HALF = 0.5
SHORT = 50  # steps; the last one that a monitor samples early
LONG = 100  # steps, in which a loss falls and a schedule shows
# Steps, which a training may compute in float32 before it goes to float16: `no_autocast`.
WARM_UP = 30
LISTED = 3  # steps that a finding names

# Skips and the loss scale.
# Skips one after the other at one scale that its policy would have lowered. Policies with a
# hysteresis wait for 2 or 3: `the_scale_is_set_in_each_step`.
SET_AGAIN = 5
SETTLING_SKIPS = 20  # skips that a scale may need: 16 halvings take 65536, the default, to 1
# The share of steps that may be skipped once the scale has settled. PyTorch's default growth tries
# a higher scale every 2,000 steps, which skips 0.05 % of them: `outliers_whose_gradients_overflow`.
MOST_SKIPPED = 0.01
RARE = 0.02  # of all steps; rarer failures are bad batches
# Of the largest number. Gradients may grow by the rest in one step: those of healthy batches can be
# ten times apart (`noisy_gradients_at_the_edge`).
CLOSE_TO_OVERFLOW = 2.0**-5
MOSTLY_NAN = 0.5  # of the inspected skips
SCALE_JUMPED = 4.0  # times the scale of the run before; one growth or backoff is a factor of 2
# The distance of the power of the scale that a loss follows from 1 or 2, and the least factor by
# which it falls: `a_penalty_on_gradients_that_are_still_scaled`, `the_loss_is_scaled_twice`.
EXACT_POWER, FELL_WITH_SCALE = 0.3, 1.3
# From this scale on, underflow does not make all gradients 0: `zero_grad_before_the_step`.
LARGE_SCALE = 2.0**10
# A larger scale fits if the largest gradient can double this often: `a_loss_with_a_tiny_weight`.
HEADROOM = 4.0
# The share of gradients that are flushed, or zero beside many small ones. Any training has some:
# `accumulation_done_right`; and `sigmoids_without_a_scale` has not twice as many.
LOST = 0.05
DEAD = 0.9  # the share of gradients that are exactly 0: `experts_that_are_cold_now_and_then`
SETTLED = 10  # steps; an adapter may start from 0, so that what is before it has no gradient

# Losses.
# Gradients of a larger loss overflow anyway, and may become NaN: `the_deviation_of_equal_numbers`.
LARGE_LOSS = 65504.0
LARGE_FROM_THE_START = 1e9  # a loss; a usual one of sums over a batch of images is below 1e6
ORDINARY = 255.0  # an input whose square float16 can hold is no outlier of a bad batch
OUTLIER = 10.0  # times the usual loss
# Times the loss before: `a_ratio_of_probabilities_that_grows` is no divergence, nor is
# `a_row_is_normalised_by_hand`.
EXPLODED = 50.0
LEAST_EXPLODED = 5.0  # a critic's first loss may be near 0, and any later one is large beside it
# Times the first loss. Targets that grow by design rarely take the weights along, or so far:
# `targets_that_grow`.
RAN_AWAY = 1e3
STILL_GROWS = 1.5  # times the loss half as long ago
FAILS_OFTEN = 0.3  # of the latest steps, if it diverges; as targets grow, fewer fail
RECENT = 20  # steps
SOON = 5  # steps from an exploded loss to an overflow that it explains, or from the start
STOOD = 0.9  # times the loss before: it has not fallen
ROSE = 2.0  # times the first loss; a batch's own loss often is a little larger
FELL = 0.05  # of the first loss, at least
SOLVED = 0.01  # times the first loss
# The distance from the log of the number of classes, at which a guess is. A loss that is far from
# learned has left it: `a_cross_entropy_that_is_slow`.
NEAR_CHANCE = 0.02
# Rows of a batch; those of fewer differ too much from batch to batch.
LEAST_BATCH = 8
# Classes of batches that hold one or two. Batches of two take turns in the training of a critic.
LEAST_CLASSES = 3
# The distance of a mean square error from the variance of its targets, which a model that gives
# their mean has, in samples of the later half of a run. Batches of 64 differ by 2 %, and a slow
# training has left it: `test_a_regression_that_is_slow_is_not_told_to_give_a_mean`.
NEAR_VARIANCE, LATE_SAMPLES = 0.05, 3
# The least factor of a sum over a batch beside a mean, which is a part of it in 16 rows; a penalty
# that is chosen has 0.1 or less. And the variance of outputs from row to row, beside that of their
# targets: a model that has begun to tell rows apart is above it in 200 steps:
# `test_a_sum_beside_a_mean_that_learns_is_not_told`.
LEAST_SUM_WEIGHT, SAME_ROWS = 0.5, 0.02
# Samples in a row, and steps of the run, as any model begins with one output for all rows.
SUMMED_SAMPLES, SUMMED_FROM = 4, 200
# Times the outputs, at the end, and 1: targets that outputs with a mean of 0 must reach.
FAR_TARGETS = 100.0
TINY_TARGETS = 1e-3  # of the first outputs, in all samples: they may have been divided twice
# Times the loss of a guess, which a first cross entropy has. That of inputs from 0 to 255 is as
# high, and falls below a guess in a few steps.
FAR_ABOVE_CHANCE = 3.0
# Times the first loss, on average in the first steps: a single batch's loss is rarely that low.
PEAKED = 1.5
# Likewise, times a cross entropy that began as a guess; if it ends below half of that, it learned.
FAR_PEAK = 3.0
# Backward passes of losses of one kind before a step. A critic has two, of the real and the fake.
LEAST_PASSES = 4
# The distances of the usual loss from a number of one digit, and of a loss from the usual one, at
# which embeddings that are all one point are told: their triplet loss is 0.5001 to 0.5015.
AT_MARGIN, NEAR_MARGIN = 5e-3, 2e-2
EARLY, LATE = 10, 20  # steps, whose mean losses are compared, as one batch's own says little
SOME_LOSSES = 10  # losses, for a median
END_LOSSES = 5  # at each end of a run, for a median
# Changes from one loss to another, as from a pretraining to a fine-tuning; in a run with more of
# them, losses rather take turns.
PHASES = 20

# Weights, gradients and learning rates.
# Units of a layer that are one, as they begin with the same weights, and the distance of one from
# another by rounding, times the largest weight. Two may be meant so, as a critic's two heads.
FEW_UNITS, SAME_UNIT = 3, 1e-4
WEIGHTS_GREW = 10.0  # times the norm of the first: `adam_with_a_large_step_on_cross_entropy`
WEIGHTS_GREW_A_LITTLE = 1.5  # which is enough beside a loss that is far from all that is meant
# Times the norm before. A weight decay that is chosen well halves or quarters it; at 0.02, two
# layers in a row pass 0.04 % of what they did: `a_weight_decay_that_outweighs_the_gradients`.
SHRUNK = 0.02
# Times the learning rate before. The second epoch of a warm-up doubles it.
RATE_JUMPED = 3.0
RATE_GREW = 10.0  # times the learning rate before
VANISHED = 20  # powers of 2 from the largest gradient of one parameter to that of another
# The same, where the graph passes so many of sigmoid and tanh in a row. A sigmoid passes on at most
# a quarter, so four lose 8 powers beside those of the weights: `test_sigmoids_in_a_row_are_named`.
VANISHED_BEHIND, MANY_IN_A_ROW = 10, 4
# The relative difference of a norm from the one divided twice by the loss scale. Rounding makes
# less, and a clipping makes more: `an_own_scale_beside_a_clipping`.
EXACT = 0.01
SAME_NORM = 2e-5  # the relative difference of norms that are clipped to one number
LARGEST_CLIP = 1e3  # the largest number that people clip gradients to
# A clipping by more, in weights that move by less: `a_clipping_that_leaves_almost_nothing`.
CLIPPED_AWAY, STAYED = 100.0, 1e-3
# Likewise, by a learning rate that is too small: one of 1e-6 in 100 steps of SGD changes 4e-6.
HARDLY_MOVED = 1e-4
# Likewise, where a loss that says that nothing was learned falls in a straight line: 2e-3 in 100
# steps of SGD at 1e-4, whose loss falls by 1 %: `test_a_rate_that_is_too_small_is_told_alone`.
CRAWLED = 5e-3
# The norm of gradients, and the relative difference of losses that are one to six digits: layers
# whose weights begin with a deviation of 0.01 or more leave more of both.
TINY_NORM, SAME_LOSS = 1e-4, 1e-6
# Times the first loss, on average in five steps: the first batch's own loss may be a low one.
CLIMBED = 10.0
# The same, where weights were loaded and the optimizer began without a state: 1.24 and 1.3 in two
# resumed runs of AdamW. Losses of batches of 128 differ by 9 % there, and means of five by 4 %.
CLIMBED_LOADED = 1.15
# A resumed run ends near where it began, 0.6 of it at least in those two. One whose loss falls to
# less has begun to learn: a fine-tuning, or a fold that loads the first weights again.
FELL_FAR = 0.5
LATEST_SAMPLES = 10  # that are kept; the gradients of a single batch may be unusual

# What is noted in a step.
FEW_ELEMENTS = 16  # of a parameter; one that moves changes in these, too
FEW_MOVES = 10  # steps, in which most parameters should have moved
MOVED_BY = 3  # steps, in which what is trained by code that is not seen has moved
MANY_CALLS = 10  # calls without a step that are worth a look
UNUSED = 0.05  # the share of all gradients; below it, one that is all 0 is rather unused, an expert
TOO_OFTEN = 2  # steps of a schedule for each of its optimizer, from the start
FADED = 1e-6  # times the largest learning rate
LEAST_OWN_SCALE = 256.0  # a smaller power of 2 is rather the size of a batch
# Rows whose factors of shapes [n] and [n, 1] are told; fewer numbers may be quantiles or heads, as
# many as rows by chance: `test_a_product_of_few_rows_is_not_told`.
LEAST_PAIRED = 8
SAME_DIFFERENCE = 1e-2  # of the largest number, for differences that were rounded to bfloat16
BELOW_0 = -1e-3  # a loss; rounding makes one of 0 a little less
HUGE = 1e9  # more than the numbers of a network that learns
SMALL_ADDEND = 0.5  # times the largest number: what is added to it was at least as large
# An eps in float16, where squares of gradients below 5e-3 are 0. Adam then makes steps of 1,500
# learning rates at the default of 1e-7, and of 17 at this.
LEAST_EPS = 1e-5
# Skips, each after an applied step, without a growth of the scale between them, from which on a
# skip of unknown gradients may come from NaN. One is an overflow in any training; a second one may
# be, which costs a replay.
SUSPICIOUS_SKIPS = 2
# The skip of a streak of unknown gradients at which it is replayed. A scale that starts too large
# has longer streaks, but few, and a gradient that is NaN in each step is told then, not at a scale
# of 1.
REPLAYED_SKIP = 2

NOT_FLUSHED = 2.0**-10  # a gradient; times a slope of 2**-14, it is not flushed in float16
FEW_SCALERS = 5  # of one optimizer; a script may make one for each fold or stage
BRIEF_SCALER = 2  # steps of one scaler
# Of updates, from one rate that is tried to the next: the least, and how far it may be from the
# most, where they are finer than jumps. Those of a warm-up fall from 2 towards 1.
LEAST_FACTOR, SAME_FACTORS = 1.05, 1.05

# When a finding is told.
FIRST_EVENTS = 6  # events: as many as early samples, and one
WORSE = 10  # times as many steps, for a second report
LONG_RUN = 50  # steps of a run that make an uncertain finding worth a report at its end

# Scales that fit the gradients of samples.
MOST_FLUSHED = 0.01  # the largest share of a parameter's nonzero gradients that may be flushed
MOST_SMALL = 0.1  # the largest share of them that may be flushed or subnormal
MOST_LEFT_OUT = 0.05  # the largest share of all gradients in parameters that may be left out
ROOM = 2  # times that the largest gradient can double before it overflows
MOST_LOST = 0.5  # the largest share that a parameter may lose at the highest scale that fits most
LEAST_ROOM = 4  # doublings of the scale; with more room, parameters that are gone may come back
FAR_SCALE = 64  # the exponent of a scale that only gradients of about 2**-50 need
MOST_GROWTH = 2.0**12  # times the latest sample; a skip that needs more is a bad batch
SPIKE = 2.0**4  # times the median of the steps before it
TYPICAL_STEPS = 100  # steps in this median

# What other tools print into a log.
STUCK_IN_LOG = 20  # skips in a row, as for a monitor ("stuck_after")
ROSE_IN_LOG = 3.0  # times; a language model's loss of 2 or 3 diverges to ln(vocabulary), 10 or so
SANK_IN_LOG = 2.0**6  # times; single skips lower the scale so far only if they outrun its growth
QUIET_RECORDS = 3  # in a row without a skip: a step was applied, though a bar prints one twice
NOT_ROUNDED = 0.01  # a loss; from one as small, 0.0 may be rounded
