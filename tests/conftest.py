"""Give JAX four CPU devices, so that layouts can be compared, and let it compile less: that is what takes long here.

XLA leaves out passes that only make code faster, here and in processes that tests start. What several tests share is
compiled once.
"""

import atexit
import gc
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

import jax  # reads its flags when it starts
import pytest

jax.config.update("jax_num_cpu_devices", 4)
gc.set_threshold(200_000, 100, 100)  # tracing makes many objects that live; looking through them took 4 % of the time

compiled = tempfile.mkdtemp(prefix="fedrecon-tests-")  # one a process: workers must not read each other's half files
atexit.register(shutil.rmtree, compiled, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", compiled)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

LONG = ["next_word", "from_keras", "train", "lookups", "engine", "cli", "cli_text", "trust", "device", "hosts"]

# What takes longest runs with `make test-slow` and in CI, so that `make test` stays short. Whole files (""), or
# tests of a file by the beginning of their names, parameters included.
SLOW = {
    "ranking_study": ["test_the_federated_job"],
    "clicks": [
        "test_tuning_tries",
        "test_a_training_on_clicks_that_fails",
        "test_columns_of_clicks",
        "test_popularity_is_kept",
    ],
    "federated_ials": ["test_training_ranks", "test_by_rows_and_by_whole"],
    "examples": [""],
    "studies": [""],
    "text_study": [""],
    "docs": ["test_every_python_block_runs", "test_the_example_of_the_readme"],
    "scale": [""],
    "recipe": [""],
    "titles": ["test_recommendations"],
    "cli": [
        "test_the_command_runs_as_a_process",
        "test_the_demo",
        "test_a_model_with_biases",
        "test_few_users_train",
        "test_a_run_is_not_resumed_on_other_data",
        "test_one_test_user_says_little",
        "test_splitting_by_time_says",
    ],
    "cli_text": [""],
    "next_word": [
        "test_only_local",
        "test_clients",
        "test_everything_global",
        "test_second",
        "test_what_recon",
        "test_a_part",
        "test_cross",
        "test_a_loss_over_positions",
        "test_an_example_that_is_masked",
        "test_padding",
    ],
    "auto_lookups": ["test_found_lookups", "test_dropout_and_averaged", "test_a_loss_sees", "test_evidence_is_traced"],
    "lookups": [
        "test_reach_is_as_little_as_is_exact[l",
        "test_declared_lookups_change_nothing_but_the_time[",
        "test_declared_lookups_change_nothing_in_joint",
        "test_rows_in_order_are_as_good_as_listed_ones_and_whole_tables[several",
        "test_rows_in_order_are_as_good_as_listed_ones_and_whole_tables[ratings-adam",
        "test_rows_in_order_are_as_good_as_listed_ones_and_whole_tables[ratings-adagrad",
        "test_rows_in_order_are_as_good_as_listed_ones_and_whole_tables[several features-adagrad",
        "test_rows_in_order_are_as_good_as_listed_ones_and_whole_tables[ratings-sgd-2",
    ],
    "engine": [
        "test_neither_block_size_nor_device_count",
        "test_neither_the_order",
        "test_clients_that_keep_state_find",
        "test_the_number_of_devices",
        "test_padding_never_changes_a_result[3",
        "test_the_type_of_ids_does_not_change_what_is_learned[uint16",
        "test_clients_packed_once_train_to_the_bits_of_clients_packed_in_every_round[one",
    ],
    "from_flax": [
        "test_a_round_of_linen",
        "test_a_network_trains",
        "test_averaged",
        "test_local_statistics",
        "test_attention",
    ],
    "from_keras": [
        "test_a_round_of_a_functional",
        "test_averaged_statistics_travel",
        "test_an_embedding_that_masks",
        "test_a_round_of_a_sequential",
        "test_a_round_of_a_subclassed",
        "test_local_statistics",
    ],
    "from_equinox": [
        "test_a_round_with_adam",
        "test_local_statistics",
        "test_a_partial_batch",
        "test_averaged",
        "test_frozen",
        "test_dropout",
    ],
    "models": ["test_implicit_feedback_keeps_lookups_sparse_and_exact"],
    "update": [
        "test_second_order",
        "test_items_rated_in_support_alone",
        "test_every_leaf_that_leaves_is_a_delta_of_a_global_parameter_or_a_sum[True",
    ],
    "finetuning": ["test_finetuning_the_words", "test_clients_do_not_see", "test_training_and_what"],
    "adapter": ["test_what_is_random", "test_a_round_of_a_plain_function", "test_what_is_local_is_said_by"],
    "text": ["test_memory_does_not_grow"],
    "train": [
        "test_a_redrawn_split_resumes",
        "test_a_killed_run",
        "test_a_resumed_run_ends",
        "test_ctrl_c",
        "test_drop_out",
        "test_a_run_with_patience_resumes",
    ],
    "trust": [
        "test_clients_with_a_single_example",
        "test_a_run_goes_on_laid_out",
        "test_rounds_that_learn_nothing",
        "test_rounds_without_anybody",
        "test_a_single_round_learns",
        "test_a_training_that_fails_says_so",
        "test_damaged_metrics",
        "test_the_old_run_is_there",
    ],
    "reading": ["test_commands_read_standard_input"],
    "cli_privacy": [""],
    "private_runs": [""],
    "private_study": ["test_a_job_measures"],
    "private": [
        "test_simulation_equals_the_protocol",
        "test_one_poisoned_client",
        "test_every_row_of_a_table_is_noised",
    ],
    "deploy_stock": ["test_a_client_app_gives"],
    "leakage": [""],
    "build": ["test_a_gradient_longer"],
    "federated_averaging": ["test_lookups_change", "test_kept_parameters_change"],
    "explain": ["test_an_optimizer_that_moves"],
    "defaults_device": [""],
    "app_baselines": [""],
    "portable": ["test_a_saved_algorithm_trains"],
    "cli_deploy": ["test_a_plan_of_text", "test_a_node_in_a_script", "test_a_server"],
    "accounting": ["test_the_table_of_noise"],
    "audit": ["test_noise_of_the_clients"],
    "secure_attacks": ["test_the_mean_of_a_secure_sum", "test_uploads_that_are_no_numbers"],
    "deploy": ["test_nodes_give"],
    "deploy_noise": [
        "test_two_runs",
        "test_without_its_noise",
        "test_nodes_count",
        "test_a_run_that_goes_on",
        "test_a_plan_with_less",
        "test_the_plan_says_what",
    ],
    "deploy_plans": [
        "test_the_default_preset",
        "test_an_operator_names",
        "test_clicks_on_nodes",
        "test_a_keras_model_on_nodes",
    ],
    "deploy_faults": [
        "test_a_secure_sum_survives",
        "test_bad_replies",
        "test_no_message_makes",
        "test_a_node_that_hangs",
        "test_a_node_with_too_few",
        "test_nodes_are_told",
    ],
    "lstm": ["test_second_derivatives", "test_gradients", "test_sentences_in_tiles", "test_a_single_client"],
    "defaults": [""],
    "tuning": [""],
    "device_bundle": [""],
    "device_runtime": ["test_anything_in_a_bundle"],
    "device_text": [""],
    "device_web": ["test_the_page_of_a_ratings_run", "test_the_shared_vectors"],
    "device_inlining": ["test_a_rewritten_function"],
    "compare": [""],
    "local": ["test_descent_goes_through"],
    "kill": [""],
    "several_hosts": [
        "test_two_processes",
        "test_two_hosts",
        "test_hosts_that_meet",
        "test_a_process_on_the_first",
        "test_processes_that_have_used",
        "test_a_killed",
        "test_a_folder",
        "test_a_process_that_hangs",
    ],
    "hosts": [
        *(
            f"test_one_client_at_a_time_gives_what_the_simulator_gives[{case}"
            for case in (
                *("names", "lookups as", "dense", "whole", "joint", "second", "learned", "evidence", "least", "random"),
                *("statistics", "clipped", "averaging", "finetuning", "ditto", "scaffold", "redrawn"),
            )
        ),
        "test_gateways_that_add_up_their_clients",
        "test_clients_keep_their_identity",
        "test_nothing_local",
    ],
}


def pytest_collection_modifyitems(items):
    """Mark what is slow, and run the files that take longest first, so that processes end together."""
    names = [f"test_{name}" for name in LONG]
    for item in items:
        beginnings = SLOW.get(item.path.stem.removeprefix("test_"), [])
        if any(item.name.startswith(beginning) for beginning in beginnings):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))
