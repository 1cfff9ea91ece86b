"""Ways to break privacy, each with the test that has to notice.

    python -m tests.mutations            tries all, in a copy of the tree
    python -m tests.mutations NAME ...   tries some

``tests/test_mutations.py`` keeps the list in step with the code.
"""

import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change to one file, and the test that must fail with it."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "clip the mean instead of each example",
        "keras_dp/clipping/layerwise.py",
        "squared = tf.add_n([tf.zeros([batch]), *_squared_norms(by_weight)])",
        "squared = tf.reduce_mean(tf.add_n(_squared_norms(by_weight))) * tf.ones([batch])",
        "tests/conformance/test_lin.py::test_entry_points",
    ),
    Mutation(
        "do not clip",
        "keras_dp/clipping/clip.py",
        "return l2_norm_clip / tf.maximum(norms, l2_norm_clip)",
        "return tf.ones_like(norms)",
        "tests/conformance/test_lin.py::test_entry_points",
    ),
    Mutation(
        "add noise to every microbatch, before the sum",
        "keras_dp/clipping/gradients.py",
        "sums = [s + m for s, m in zip(sums, more)]",
        "sums = [s + m + tf.random.normal(m.shape) for s, m in zip(sums, more)]",
        "tests/conformance/test_noise.py::test_arguments",
    ),
    Mutation(
        "divide by the real batch",
        "keras_dp/optimizers/base.py",
        "lambda sums: self._update(sums, variables)",
        "lambda sums: self._update([s * self.batch_size / tf.cast(grads.num_examples, tf.float32)"
        " for s in sums], variables)",
        "tests/conformance/test_lin.py::test_divisor_is_the_constant",
    ),
    Mutation(
        "scale the noise for the mean, then divide again",
        "keras_dp/optimizers/base.py",
        "self._noise.add(private, self.noise_stddev)",
        "self._noise.add(private, self.noise_stddev / self.batch_size)",
        "tests/conformance/test_noise.py::test_entry_points",
    ),
    Mutation(
        "reuse the key in every step",
        "keras_dp/noise.py",
        "first = self._drawn.assign_add(len(streams)) - len(streams)",
        "first = self._drawn + 0",
        "tests/conformance/test_noise.py::test_entry_points",
    ),
    Mutation(
        "reuse the key for every stream",
        "keras_dp/noise.py",
        "first + number, sum",
        "first, sum",
        "tests/conformance/test_noise.py::test_entry_points",
    ),
    Mutation(
        "use the same secret in every run",
        "keras_dp/noise.py",
        "secret = os.urandom(16)",
        "secret = bytes(16)",
        "tests/conformance/test_noise.py::test_two_optimizers_share_no_noise",
    ),
    Mutation(
        "skip the update of an empty batch",
        "keras_dp/training.py",
        "optimizer.apply_gradients(clipped)",
        "tf.cond(clipped.num_examples > 0,"
        " lambda: tf.cast(optimizer.apply_gradients(clipped), tf.int64),"
        " lambda: tf.constant(0, tf.int64))",
        "tests/test_training.py::test_an_empty_draw_is_an_update",
    ),
    Mutation(
        "let a NaN through",
        "keras_dp/clipping/clip.py",
        "finite = tf.math.is_finite(squared_norms)",
        "finite = tf.ones_like(squared_norms, tf.bool)",
        "tests/conformance/test_pair.py::test_models",
    ),
    Mutation(
        "count padding",
        "keras_dp/clipping/clip.py",
        "factors = tf.where(counted, factors, 0.0)",
        "factors = factors + 0.0",
        "tests/clipping/test_gradients.py"
        "::test_padding_counts_nowhere_even_if_the_loss_ignores_weights",
    ),
    Mutation(
        "count rows twice in the last microbatch",
        "keras_dp/clipping/gradients.py",
        "fresh = None if even else tf.repeat(start + tf.range(width) >= k * width, per_user)",
        "fresh = None",
        "tests/clipping/test_gradients.py::test_microbatches_change_nothing",
    ),
    Mutation(
        "forget a second use of a layer",
        "keras_dp/clipping/forms.py",
        "if len(forms) == 1:",
        "if len(forms) >= 1:",
        "tests/conformance/test_loop.py::test_auto",
    ),
    Mutation(
        "square the uses of a layer one by one",
        "keras_dp/clipping/forms.py",
        "same = tf.cast(self.ids[:, :, None] == self.ids[:, None, :], tf.float32)",
        "same = tf.eye(tf.shape(self.ids)[1])[None]",
        "tests/clipping/test_gradients.py::test_repeated_ids_add_before_the_norm",
    ),
    Mutation(
        "trust a Gram norm where positions cancel",
        "keras_dp/clipping/forms.py",
        "return norms + GRAM_ROUNDING * tf.square(sizes) + lost",
        "return norms",
        "tests/conformance/test_pair.py::test_gradients_that_cancel",
    ),
    Mutation(
        "add the squares of the two uses of a tied table",
        "keras_dp/clipping/forms.py",
        "return tf.maximum(squares + 2 * inner, 0.0)",
        "return tf.maximum(squares, 0.0)",
        "tests/clipping/rules/test_reversible_embedding.py::test_several_uses_of_each_kind",
    ),
    Mutation(
        "trust the norm of a tied table whose uses cancel",
        "keras_dp/clipping/forms.py",
        " + GRAM_ROUNDING * (squares + 2 * hidden)",
        "",
        "tests/clipping/test_forms.py::test_a_row_and_a_logit_that_cancel",
    ),
    Mutation(
        "join uses of a kernel and of its transpose",
        "keras_dp/clipping/forms.py",
        "layouts = {f.layout for f in products}",
        "layouts = {IN_ORDER for f in products}",
        "tests/test_testing.py::test_two_uses_in_two_layouts",
    ),
    Mutation(
        "take the embedded positions for examples",
        "keras_dp/clipping/recording.py",
        "            return tf.repeat(value, self.batch * self._fold, 0)",
        "            return tf.repeat(value, self._fold, 0)",
        "tests/clipping/test_alignment.py::test_as_many_positions_as_examples",
    ),
    Mutation(
        "repeat the input of a layer whatever it then computes",
        "keras_dp/clipping/alignment.py",
        " and repeated.gives_outputs_of(plain)",
        "",
        "tests/clipping/test_alignment.py::test_what_computes_something_else_stays_vectorized",
    ),
    Mutation(
        "look at outputs only in the trial run",
        "keras_dp/clipping/alignment.py",
        "            outputs = _keras.call_model(model, batch)\n",
        "            outputs = _keras.call_model(model, batch)\n"
        "            outputs = tf.nest.map_structure(tf.stop_gradient, outputs)\n",
        "tests/clipping/test_alignment.py::test_gradients_tell_where_outputs_do_not",
    ),
    Mutation(
        "accept plain gradients",
        "keras_dp/optimizers/base.py",
        "        if not isinstance(grads, ClippedGradients) or trainable_variables is not None:\n",
        "        if not isinstance(grads, ClippedGradients):\n"
        "            return super().apply(grads, trainable_variables)\n"
        "        if False:\n",
        "tests/test_training.py::test_plain_gradients_are_refused_every_time",
    ),
    Mutation(
        "apply the same clipped gradients twice",
        "keras_dp/clipping/clipped.py",
        "        self._spent = True\n",
        "        self._spent = False\n",
        "tests/test_training.py::test_clipped_gradients_serve_once_and_their_own_optimizer",
    ),
    Mutation(
        "ignore a weight that is read outside its layer",
        "keras_dp/clipping/layerwise.py",
        "    recorder.check_strays()\n",
        "",
        "tests/conformance/test_loop.py::test_auto",
    ),
    Mutation(
        "clip the regularizer with the data",
        "keras_dp/_keras.py",
        "        variable.regularizer = None\n    try:",
        "        pass\n    try:",
        "tests/clipping/test_gradients.py::test_weight_regularizers_stay_outside_the_clip",
    ),
    Mutation(
        "keep what a forward pass writes",
        "keras_dp/clipping/passes.py",
        "    for generator in _keras.seed_generators(model):\n",
        "    for v in model.non_trainable_variables:\n"
        "        v.assign(scope.get_current_value(v) if scope.get_current_value(v) is not None"
        " else v)\n"
        "    for generator in _keras.seed_generators(model):\n",
        "tests/clipping/test_gradients.py::test_state_that_depends_on_data_stays_as_it_was",
    ),
    Mutation(
        "let examples of a batch influence each other",
        "keras_dp/clipping/gradients.py",
        "validation.require_valid(model, probe=True, input_spec=specs)",
        "pass",
        "tests/conformance/test_pair.py::test_a_coupled_model_is_refused",
    ),
    Mutation(
        "take the rows of a layer for the examples",
        "keras_dp/clipping/gradients.py",
        "    if rows_are.aligned is False:\n",
        "    if False:\n",
        "tests/clipping/test_gradients.py::test_rows_that_are_not_the_examples",
    ),
    Mutation(
        "take norms in float16",
        "keras_dp/clipping/forms.py",
        "        self.a, self.g = tf.cast(a, tf.float32), tf.cast(g, tf.float32)\n"
        "        self.shape, self.layout",
        "        self.a, self.g = tf.cast(a, tf.float16), tf.cast(g, tf.float16)\n"
        "        self.shape, self.layout",
        "tests/conformance/test_lin.py::test_float16_norms_are_taken_in_float32",
    ),
    Mutation(
        "write the seed into the config",
        "keras_dp/optimizers/base.py",
        "return config | dataclasses.asdict(self._privacy)",
        "return config | dataclasses.asdict(self._privacy) | {'seed': 987654321}",
        "tests/optimizers/test_private.py::test_the_secret_is_in_no_file",
    ),
    Mutation(
        "let a loss read what layers have left of the batch",
        "keras_dp/clipping/layerwise.py",
        "reads = _depends(losses, outputs, given)",
        "reads = False",
        "tests/clipping/test_gradients.py::test_a_loss_that_reads_activations",
    ),
    Mutation(
        "take a layer on its word however it is called",
        "keras_dp/clipping/composition.py",
        "and min(ranks) >= 2 and condition(layer, ranks)",
        "",
        "tests/clipping/test_composition.py::test_coupling_by_the_call_is_refused",
    ),
    Mutation(
        "try layers that may share state one by one",
        "keras_dp/clipping/composition.py",
        "return found if found is not None and len(found) <= 1 else None",
        "return found",
        "tests/clipping/test_composition.py::test_two_other_layers_are_tried_together",
    ),
    Mutation(
        "write what was spent after the updates",
        "keras_dp/callbacks/spending.py",
        "max(most, made), self._optimizer()\n            self._put()\n",
        "max(most, made), self._optimizer()\n",
        "tests/callbacks/test_resuming.py::test_updates_are_on_file_before_they_are_made",
    ),
    Mutation(
        "take new updates after a checkpoint for those of the first time",
        "keras_dp/callbacks/spending.py",
        "        if optimizer.restores and optimizer.restores[-1][1][0] == run:\n",
        "        if False:\n",
        "tests/callbacks/test_resuming.py::test_the_same_in_a_new_process",
    ),
    Mutation(
        "take the updates of another run for those of this one",
        "keras_dp/accounting/ledger.py",
        "if entry.run == run and entry.start <= reached:",
        "if entry.start <= reached:",
        "tests/callbacks/test_resuming.py::test_another_run_of_equal_settings_does_not_pass_for_it",
    ),
    Mutation(
        "let processes write the ledger at the same time",
        "keras_dp/accounting/ledger_file.py",
        "            fcntl.flock(lock, fcntl.LOCK_EX)\n",
        "            pass\n",
        "tests/accounting/test_ledger.py::test_processes_that_write_at_the_same_time_lose_nothing",
    ),
    Mutation(
        "believe a ledger that was edited",
        "keras_dp/accounting/ledger_file.py",
        "    if found != _checksum(body):\n",
        "    if False:\n",
        "tests/accounting/test_ledger.py::test_damaged_files_are_refused_and_left_alone",
    ),
    Mutation(
        "stop when the budget has been passed",
        "keras_dp/callbacks/privacy_budget.py",
        "        if not self._prepared:\n            self._stop()\n",
        "        if not self._allows(self.ledger.phases):\n            self._stop()\n",
        "tests/callbacks/test_privacy_budget.py::test_it_stops_before_the_update_that_would_exceed",
    ),
    Mutation(
        "take an execution for one update",
        "keras_dp/callbacks/base.py",
        "        batches = min(self.model.steps_per_execution, left)\n",
        "        batches = min(1, left)\n",
        "tests/callbacks/test_privacy_budget.py::test_it_stops_before_the_update_that_would_exceed",
    ),
    Mutation(
        "hold fit to the budget, but not train_on_batch",
        "keras_dp/entry_points.py",
        "            callback.before_train_on_batch(self)\n",
        "            pass\n",
        "tests/callbacks/test_privacy_budget.py::test_train_on_batch_is_held_to_the_same_budget",
    ),
    Mutation(
        "account arrays as Poisson draws",
        "keras_dp/callbacks/source.py",
        "        if rows_of(fit.x) is not None:\n",
        "        if False:\n",
        "tests/callbacks/test_source.py::test_arrays_in_place_of_the_sampler",
    ),
    Mutation(
        "count an example once in an update that spans two passes",
        "keras_dp/callbacks/source.py",
        'times = participations if self.sampling == "shuffle" else 1',
        "times = 1",
        "tests/callbacks/test_accumulated.py::test_updates_that_span_two_passes",
    ),
    Mutation(
        "let the parts that an earlier fit left into an update",
        "keras_dp/entry_points.py",
        "    optimizer.begin_logical_batch()\n",
        "    pass\n",
        "tests/optimizers/test_accumulation.py::test_each_fit_begins_a_logical_batch",
    ),
    Mutation(
        "take the batch size of a sampler that is not passed on trust",
        "keras_dp/callbacks/source.py",
        "            self._check_sampler(sampler, optimizer)\n",
        "            pass\n",
        "tests/callbacks/test_source.py::test_a_sampler_that_is_told_by_number_and_word",
    ),
    Mutation(
        "take several updates on one draw for draws",
        "keras_dp/callbacks/base.py",
        "if source.sampling in DRAWS and updates > most:",
        "if False:",
        "tests/callbacks/test_source.py::test_a_train_step_that_uses_a_draw_five_times",
    ),
    Mutation(
        "take steps_per_epoch for a pass",
        "keras_dp/callbacks/accumulated.py",
        "        if not self._steps:\n",
        "        if True:\n",
        "tests/callbacks/test_accumulated.py::test_steps_per_epoch_are_not_a_pass",
    ),
    Mutation(
        "believe a counter that a checkpoint set back",
        "keras_dp/callbacks/spending.py",
        "        expected = self.made + released - self._released\n        moved",
        "        expected = self.made\n        moved",
        "tests/callbacks/test_resuming.py::test_a_checkpoint_that_is_restored_within_an_epoch",
    ),
    Mutation(
        "start anew with another optimizer",
        "keras_dp/accounting/ledger.py",
        "        return merged_phases(entry.phase for entry in self.entries)\n",
        "        return merged_phases(entry.phase for entry in self.entries[-1:])\n",
        "tests/callbacks/test_epsilon_logger.py::test_optimizers_in_turn_add_up",
    ),
    Mutation(
        "account draws that are cut as plain Poisson draws",
        "keras_dp/accounting/phases.py",
        "        if self._is_cut:\n            return dp_accounting.Trunc",
        "        if False:\n            return dp_accounting.Trunc",
        "tests/accounting/test_phases.py::test_truncated_draws_by_both_accountants",
    ),
    Mutation(
        "let a replaced example cost what a removed one does",
        "keras_dp/renyi.py",
        "    sensitivity = 2 if replace_one else 1\n",
        "    sensitivity = 1\n",
        "tests/accounting/test_phases.py::test_replacing_an_example_doubles_the_sensitivity",
    ),
    Mutation(
        "replace examples of a draw by null ones only",
        "keras_dp/renyi.py",
        "    log_b = _log_mixture(q, sigma, -z)\n",
        "    log_b = np.zeros_like(z)\n",
        "tests/accounting/test_mechanisms.py::test_poisson_replace_one",
    ),
    Mutation(
        "read the noise of fixed-size draws relative to the clipping norm",
        "keras_dp/renyi.py",
        "_MOST_NOISE_WITHOUT_REPLACEMENT) / 2)",
        "_MOST_NOISE_WITHOUT_REPLACEMENT))",
        "tests/accounting/test_phases.py::test_sampling_without_replacement_equals_dp_accounting",
    ),
    Mutation(
        "forget the earlier phases of one kind",
        "keras_dp/accounting/composition.py",
        "counts.get(phase.release, 0) + phase.releases",
        "phase.releases",
        "tests/accounting/test_composition.py::test_a_phase_is_the_sum_of_its_parts_in_any_order",
    ),
    Mutation(
        "count a unit once in updates that span epochs",
        "keras_dp/accounting/phases.py",
        "        return min(times * self.passes, times**2 * self.steps)\n",
        "        return self.passes\n",
        "tests/accounting/test_phases.py::test_shuffled_epochs_count_as_often_as_a_unit_can_be_in_an_update",
    ),
    Mutation(
        "compose phases of unlike relations",
        "keras_dp/accounting/phases.py",
        "    if len(relations) <= 1:\n",
        "    if True:\n",
        "tests/accounting/test_phases.py::test_relations_of_several_phases",
    ),
    Mutation(
        "spread the examples of a person over the updates",
        "keras_dp/accounting/groups.py",
        "event.noise_multiplier / group_size)",
        "event.noise_multiplier / group_size**0.5)",
        "tests/accounting/test_groups.py::test_without_amplification_the_sensitivity_is_as_many_times_larger",
    ),
    Mutation(
        "let calibration end on the wrong side of the target",
        "keras_dp/accounting/calibration.py",
        "    while excess(log_sigma) > 0:",
        "    while excess(log_sigma) > 1e-4:",
        "tests/accounting/test_calibration.py::test_calibration_never_exceeds_the_target_and_wastes_no_noise",
    ),
    Mutation(
        "take the number of steps that first exceeds the target",
        "keras_dp/accounting/calibration.py",
        "        low, high = (middle, high) if allows(middle) else (low, middle)\n    return low",
        "        low, high = (middle, high) if allows(middle) else (low, middle)\n    return high",
        "tests/accounting/test_solving.py::test_solutions_stay_within_the_target_and_use_it",
    ),
    Mutation(
        "add noise to every part of a logical batch",
        "keras_dp/optimizers/base.py",
        "totals = accumulator.totals(scaled_sums, variables, first)",
        "noisy = self._privatized(scaled_sums, variables)\n"
        "        totals = accumulator.totals(noisy, variables, first)",
        "tests/optimizers/test_accumulation.py::test_noise_is_added_once",
    ),
    Mutation(
        "count every part of a logical batch as an update",
        "keras_dp/optimizers/base.py",
        "            lambda: accumulator.keep(totals),\n        )",
        "            lambda: accumulator.keep(totals),\n        )\n"
        "        self._iterations.assign_add(1)",
        "tests/optimizers/test_accumulation.py::test_two_halves_are_one_batch",
    ),
    Mutation(
        "keep the sums of a logical batch for the next",
        "keras_dp/optimizers/accumulation.py",
        "return tf.cond(first, lambda: [tf.identity(n) for n in new], added)",
        "return added()",
        "tests/optimizers/test_accumulation.py::test_two_halves_are_one_batch",
    ),
    Mutation(
        "keep the sums of a frozen weight",
        "keras_dp/optimizers/accumulation.py",
        "new = [tf.zeros(v.shape) if n is None else n for v, n in zip(self._variables, new)]",
        "new = [self._sums[id(v)] if n is None else n for v, n in zip(self._variables, new)]",
        "tests/optimizers/test_accumulation.py::test_freezing_a_layer_leaves_no_sum_behind",
    ),
    Mutation(
        "write the sums of half a logical batch into checkpoints",
        "keras_dp/optimizers/base.py",
        "            self._accumulator.build(variables)",
        "            self._accumulator.build(variables)\n"
        "            self.parts = list(self._accumulator._sums.values())",
        "tests/optimizers/test_accumulation.py::test_the_sums_are_in_no_file",
    ),
    Mutation(
        "let Keras accumulate noisy gradients",
        "keras_dp/optimizers/base.py",
        "return None if self._calls_into_keras else",
        "return",
        "tests/optimizers/test_accumulation.py::test_kerass_own_machinery_stays_off",
    ),
    Mutation(
        "keep the sums of an unfinished draw",
        "keras_dp/optimizers/accumulation.py",
        "first = self._draw.read_value() != draw",
        "first = self._draw.read_value() == _NONE",
        "tests/optimizers/test_accumulation.py::test_an_unfinished_draw_is_dropped",
    ),
    Mutation(
        "release a draw of which a piece is missing",
        "keras_dp/optimizers/accumulation.py",
        "last &= all_there",
        "last |= False",
        "tests/optimizers/test_accumulation.py::test_a_draw_with_a_piece_missing_is_never_released",
    ),
    Mutation(
        "let fit clip the rows of a user one by one",
        "keras_dp/entry_points.py",
        "isinstance(call.x, PoissonSampler)",
        "False",
        "tests/callbacks/test_source.py::test_users_are_grouped_whether_or_not_anybody_accounts",
    ),
    Mutation(
        "take a table as long as the batch for rows of the examples",
        "keras_dp/clipping/fallback.py",
        "if len(leaves) > 1 and not _is_of_keras(layer):",
        "if False:",
        "tests/clipping/test_fallback.py::test_what_is_as_long_as_the_batch",
    ),
    Mutation(
        "clip each copy of an example by itself",
        "keras_dp/clipping/units.py",
        "return Batch(*data, real, counted, shares, privacy.rows_per_unit)",
        "return Batch(*data, real, counted, shares, per_user)",
        "tests/conformance/test_lin.py::test_copies_that_are_alike_change_nothing",
    ),
    Mutation(
        "clip each row of a user by itself",
        "keras_dp/clipping/units.py",
        "return Batch(*data, real, counted, shares, privacy.rows_per_unit)",
        "return Batch(*data, real, counted, shares, copies)",
        "tests/conformance/test_lin.py::test_a_user_is_clipped_once",
    ),
    Mutation(
        "forget the copies in the fallback",
        "keras_dp/clipping/layerwise.py",
        "fallback.per_example_gradients(use, gradients, scope, count)",
        "fallback.per_example_gradients(use, gradients, scope)",
        "tests/conformance/test_loop.py::test_units_of_two_rows",
    ),
    Mutation(
        "draw a number that is fixed",
        "keras_dp/sampling/draws.py",
        "return indices[: np.searchsorted(indices, num_units)]",
        "return indices[: min(round(mean), np.searchsorted(indices, num_units))]",
        "tests/sampling/test_draws.py::test_sizes_are_binomial",
    ),
    Mutation(
        "use a draw for two updates",
        "keras_dp/sampling/draws.py",
        "self._rounds[index] += 1",
        "self._rounds[index] += 0",
        "tests/sampling/test_poisson.py::test_each_reading_is_a_new_draw",
    ),
    Mutation(
        "cut a draw at its capacity",
        "keras_dp/sampling/poisson.py",
        "return draw, units[:, None]",
        "return draw, units[: self._capacity, None]",
        "tests/sampling/test_poisson.py::test_a_draw_above_capacity_is_not_cut",
    ),
    Mutation(
        "take padding for examples",
        "keras_dp/sampling/batches.py",
        "np.full_like(weights, PADDING_WEIGHT)",
        "np.zeros_like(weights)",
        "tests/sampling/test_poisson.py::test_real_rows_come_first_and_padding_is_marked",
    ),
    Mutation(
        "draw the examples of a user one by one",
        "keras_dp/sampling/users.py",
        "ordered[1:] != ordered[:-1]",
        "ordered[1:] == ordered[1:]",
        "tests/sampling/test_users.py::test_rows_of_a_user_stand_together_and_are_at_most_k",
    ),
    Mutation(
        "go on after the pieces that Keras has only looked at",
        "keras_dp/sampling/poisson.py",
        "        self._in_order.begin()\n",
        "",
        "tests/sampling/test_pieces.py::test_keras_gets_whole_draws",
    ),
    Mutation(
        "lose what the pieces of a draw have no room for",
        "keras_dp/sampling/poisson.py",
        "end = size if last else begin + self.physical_batch_size",
        "end = begin + self.physical_batch_size",
        "tests/sampling/test_private.py::test_pieces_make_the_update_of_the_whole_draw",
    ),
    Mutation(
        "give two examples the same random numbers",
        "keras_dp/sampling/draws.py",
        "return self._generator(self._secrets[1], position)",
        "return self._generator(self._secrets[1], 0)",
        "tests/sampling/test_examples.py::test_random_numbers_are_never_used_twice",
    ),
    Mutation(
        "claim amplification for a stream",
        "keras_dp/sampling/fixed.py",
        '    sampling = "shuffle"\n',
        '    sampling = "poisson"\n',
        "tests/sampling/test_fixed.py::test_fit_updates_once_for_every_batch_and_logs_epsilon",
    ),
    Mutation(
        "take a pass over a stream on its word",
        "keras_dp/sampling/fixed.py",
        "if begun > self._num_examples or",
        "if False and",
        "tests/sampling/test_fixed.py::test_a_wrong_number_of_examples_is_told",
    ),
    Mutation(
        "halve the noise of every update",
        "keras_dp/optimizers/base.py",
        "return self.noise_multiplier * self.sensitivity / self.batch_size",
        "return self.noise_multiplier * self.sensitivity / self.batch_size / 2",
        "tests/auditing/test_audits.py::test_many_runs_stay_under_the_claim_and_come_close",
    ),
    Mutation(
        "do not clip, seen by an audit",
        "keras_dp/clipping/clip.py",
        "return l2_norm_clip / tf.maximum(norms, l2_norm_clip)",
        "return tf.ones_like(norms)",
        "tests/auditing/test_audits.py::test_one_run_stays_under_the_claim_and_sees_something",
    ),
    Mutation(
        "draw the same examples in every batch, seen by an audit",
        "keras_dp/sampling/draws.py",
        "return indices[: np.searchsorted(indices, num_units)]",
        "return np.arange(num_units - round(num_units * probability), num_units)",
        "tests/auditing/test_audits.py::test_sampled_runs_stay_under_the_claim",
    ),
    Mutation(
        "forget delta in an audit",
        "keras_dp/auditing/guesses.py",
        "return min(exceeded + 2 * num_canaries * delta * float(steepest), 1.0)",
        "return min(exceeded, 1.0)",
        "tests/auditing/test_guesses.py::test_p_value_is_the_theorem",
    ),
    Mutation(
        "take the best of several bounds for one",
        "keras_dp/auditing/guesses.py",
        "level = (1 - checked_confidence(confidence)) / len(tries)",
        "level = 1 - checked_confidence(confidence)",
        "tests/auditing/test_guesses.py::test_choosing_the_best_of_several_numbers_keeps_the_confidence",
    ),
    Mutation(
        "begin a training where the last one ended",
        "keras_dp/auditing/runs.py",
        "self._start.restore()\n            self._canaries.begin()",
        "self._canaries.begin()",
        "tests/auditing/test_audits.py::test_trainings_begin_from_the_same_weights",
    ),
    Mutation(
        "forget what a killed run of the ImageNet recipe has spent",
        "train_scripts/imagenet.py",
        'where = values.ledger or folder / "privacy_ledger.json"',
        'where = values.ledger or folder / f"ledger{os.getpid()}.json"',
        "tests/train_scripts/test_imagenet.py::test_killed_within_an_epoch_and_resumed",
    ),
    Mutation(
        "seed the noise of the classifier",
        "train_scripts/train_classifier.py",
        "augmentations=values.augmentations,\n        **arguments,",
        "augmentations=values.augmentations,\n        seed=0,\n        **arguments,",
        "tests/train_scripts/test_train_classifier.py::test_private_and_not_beside_each_other",
    ),
    Mutation(
        "let every replica of a TPU update by its own sum",
        "keras_dp/optimizers/replicas.py",
        "totals = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)",
        "totals = sums",
        "tests/benchmarks/test_tpu_strategy.py::test_only_the_gradients_are_sent",
    ),
    Mutation(
        "let replicas of a TPU agree on every variable again",
        "keras_dp/optimizers/replicas.py",
        "context.merge_call(on_every_device, args=(batch, totals, *extra))",
        "update(totals, *extra)",
        "tests/benchmarks/test_tpu_strategy.py::test_only_the_gradients_are_sent",
    ),
    Mutation(
        "give a TPU the real rows of a batch only, in a shape of their own",
        "keras_dp/clipping/compilation.py",
        "return isinstance(tf.distribute.get_strategy(), kinds)",
        "return False",
        "tests/benchmarks/test_tpu_strategy.py::test_only_the_gradients_are_sent",
    ),
    Mutation(
        "let workers with one seed make the same draws",
        "keras_dp/sampling/draws.py",
        '_derived(secret + worker, b"worker")',
        '_derived(secret, b"worker")',
        "tests/distribution/test_multi_worker.py::test_the_union_of_the_draws_is_poisson",
    ),
    Mutation(
        "let each worker draw from all examples",
        "keras_dp/sampling/shares.py",
        "return indices * self.workers + self.worker",
        "return indices",
        "tests/distribution/test_multi_worker.py::"
        "test_without_noise_it_is_one_process_on_the_union_of_the_draws",
    ),
    Mutation(
        "take data that TensorFlow shards",
        "keras_dp/distribution/data.py",
        "return isinstance(x, type(empty))",
        "return isinstance(x, (type(empty), tf.data.Dataset, tf.distribute.DistributedDataset))",
        "tests/distribution/test_multi_worker.py::test_refused_on_all_workers",
    ),
    Mutation(
        "account what each worker draws for itself as one draw",
        "keras_dp/callbacks/source.py",
        "            self._check_workers(workers, fit)\n",
        "            pass\n",
        "tests/distribution/test_multi_worker.py::test_refused_on_all_workers",
    ),
    Mutation(
        "let every worker count the updates on a ledger of its own",
        "keras_dp/callbacks/base.py",
        "if given.path is None or self._is_chief:",
        "if given.path is None or self._is_chief or True:",
        "tests/distribution/test_multi_worker.py::"
        "test_the_chief_alone_writes_the_ledger_and_the_statement",
    ),
    Mutation(
        "go on from other weights on each worker",
        "keras_dp/distribution/agreement.py",
        "if not cluster.total(self._strategy, [mine != chiefs])[0]:",
        "if True:",
        "tests/distribution/test_multi_worker.py::test_workers_have_the_same_bits_and_numbers",
    ),
    Mutation(
        "leave the sum over the replicas out",
        "keras_dp/optimizers/replicas.py",
        "totals = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)",
        "totals = sums",
        "tests/distribution/test_mirrored.py::test_lin",
    ),
    Mutation(
        "divide by what a replica expects",
        "keras_dp/optimizers/replicas.py",
        "context.all_reduce(tf.distribute.ReduceOp.SUM, sums)",
        "context.all_reduce(tf.distribute.ReduceOp.MEAN, sums)",
        "tests/distribution/test_mirrored.py::test_lin",
    ),
    Mutation(
        "let Keras divide the loss of an example by the number of replicas",
        "keras_dp/_keras.py",
        "return value if _is_example.get() else plain(value)",
        "return plain(value)",
        "tests/distribution/test_mirrored.py::test_lin",
    ),
    Mutation(
        "add noise on each replica, before the sum",
        "keras_dp/optimizers/replicas.py",
        "all_reduce(tf.distribute.ReduceOp.SUM, sums)",
        "all_reduce(tf.distribute.ReduceOp.SUM,"
        " [s + 0.2 * tf.random.normal(s.shape) for s in sums])",
        "tests/distribution/test_mirrored_privacy.py::test_noise",
    ),
    Mutation(
        "draw other noise on each device",
        "keras_dp/noise.py",
        "key=tf.bitcast(self._secret[:1], tf.uint64)",
        "key=tf.bitcast(tf.random.uniform([1], maxval=2**62, dtype=tf.int64), tf.uint64)",
        "tests/distribution/test_mirrored_privacy.py::test_noise",
    ),
    Mutation(
        "give every replica the whole batch",
        "keras_dp/optimizers/replicas.py",
        "    if len(strategy.experimental_local_results(batch)) < replicas:",
        "    if False:",
        "tests/distribution/test_mirrored_privacy.py::test_the_same_batch_for_all_replicas_is_refused",
    ),
    Mutation(
        "let train_on_batch do so",
        "keras_dp/distribution/trainer.py",
        "step = _on_shares(self, getattr(self, function))",
        "step = getattr(self, function)",
        "tests/distribution/test_trainer.py::test_train_on_batch_shares_the_batch_out",
    ),
    Mutation(
        "split the rows of a user between replicas",
        "keras_dp/sampling/poisson.py",
        "indices = self._share.spread(units, size).reshape(-1)",
        "indices = self._share.spread(units.reshape(-1, 1), size * rows).reshape(-1)",
        "tests/distribution/test_data.py::test_rows_of_a_user_lie_in_one_share",
    ),
    Mutation(
        "leave the padding to the last replica",
        "keras_dp/sampling/shares.py",
        "return by_replica.reshape(size, -1)",
        "return rows",
        "tests/distribution/test_data.py::test_rows_of_a_user_lie_in_one_share",
    ),
    Mutation(
        "train under a strategy that nobody has looked at",
        "keras_dp/optimizers/replicas.py",
        "if not isinstance(strategy, _SUPPORTED):",
        "if False:",
        "tests/distribution/test_strategies.py::test_a_model_in_the_scope_of_another_strategy",
    ),
    Mutation(
        "count the step that finds the end of the data",
        "keras_dp/optimizers/replicas.py",
        "with tf.control_dependencies(sums):",
        "with tf.control_dependencies([]):",
        "tests/distribution/test_data.py::test_the_end_of_the_data_is_no_update",
    ),
]


def caught(mutation):
    """Applies the mutation to a copy of the tree and says whether its test fails there."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".*", "output", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=ignore)
        path = copy / mutation.file
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, mutation.test], cwd=copy, capture_output=True, text=True, check=False
        )
        return done.returncode == 1 and "failed" in done.stdout


def main(names):
    """Tries the mutations of these names, or all; exits 1 when one goes unnoticed."""
    missed = 0
    for mutation in MUTATIONS:
        if names and mutation.name not in names:
            continue
        ok = caught(mutation)
        missed += not ok
        print(f"{'caught' if ok else 'MISSED'}: {mutation.name} ({mutation.test})", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main(sys.argv[1:])
