"""The sizing command: what fits, by hand calculation, its order and its words."""

import json
import re

import pytest

from vdpp_core.__main__ import main
from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons import advice, article
from vdpp_core.lessons.advice import Layout

SIZES = {"parameters": 70e9, "hidden": 8192, "layers": 80}  # Llama 3 70B; by default with the sequence 4096
LAYER = 4096 * 8192 / 1e9  # GB of a byte per value of a sample


def gb(size):
    return pytest.approx(size, rel=1e-9)


def row(gpus, layout, **given):
    return advice.row(advice.training(gpus, **SIZES | given), layout)


def test_full_shard_over_8_is_140_gb_of_state_alone():
    found = row(8, Layout(1, 1, 8, "FULL_SHARD"))
    assert found["state_gb"] == gb(16 * 70 / 8)
    assert found["gathered_gb"] == gb((2 * 140 + 280) / 80)  # two layers in bf16, the gradients of one in fp32
    assert found["activations_gb"] == gb(34 * 80 * LAYER)
    assert (found["cause"], found["reason"]) == (
        "state",
        "FULL_SHARD over 8: 140 GB of state alone; a GPU has 80 GB",
    )
    assert found["inside_gb"] == gb((2 * 140 + 280) * 7 / 8)
    assert found["between_gb"] == 0
    assert found["article"] == (
        "state 70 GB instead of 140, activations 42.95 GB instead of 91.27, traffic 245 GB instead of 490"
    )


def test_bf16_and_checkpointing_fit_where_the_article_says_so():
    layout = Layout(1, 1, 8, "FULL_SHARD")
    found = row(8, layout, precision="bf16")
    assert (found["state_gb"], found["cause"]) == (gb(70), "activations")
    assert found["reason"].endswith("6.51 GB of activations with --checkpointing, still too much")
    assert found["activations_gb"] == gb(34 * 80 * LAYER)
    again = row(8, layout, precision="bf16", checkpointing=True)
    assert again["activations_gb"] == gb((2 * 80 + 34) * LAYER)


def test_two_dimensions_by_hand():
    found = row(32, Layout(8, 1, 4, "FULL_SHARD"), batch=8, iteration_seconds=2.0)
    assert found["state_gb"] == gb(16 * 70 / 32)
    assert found["activations_gb"] == gb(2 * 80 * 13 * LAYER)
    tensor, data = 80 * 4 * 2 * (2 * 2 * LAYER) * 7 / 8, (2 * 140 + 280) / 8 * 3 / 4
    assert found["inside_gb"] == gb(tensor)
    assert found["between_gb"] == gb(data)  # one DP rank in each node
    assert found["between_gbit_per_s"] == gb(8 * data / 2)
    assert (found["cause"], "with --checkpointing, which fits" in found["reason"]) == ("activations", True)
    assert row(32, Layout(8, 1, 4, "FULL_SHARD"), batch=8, checkpointing=True)["inside_gb"] == gb(5 / 4 * tensor)


def test_stages_by_hand():
    one, two = (row(64, Layout(8, 4, 2, "SHARD_GRAD_OP", chunks), batch=32, iteration_seconds=1.0) for chunks in (1, 2))
    assert (one["micro_batches"], one["schedule"], two["schedule"]) == (16, "1F1B", "Interleaved 1F1B")
    assert (one["bubble"], two["bubble"]) == (3 / 19, 3 / 35)
    assert one["activations_gb"] == gb(4 * 20 * 13 * LAYER)
    assert two["activations_gb"] == gb((4 + 3 / 2) * 20 * 13 * LAYER)
    own = 70 / 32  # parameters of a GPU before data parallelism
    assert one["state_gb"] == gb(16 * own / 2)
    assert one["gathered_gb"] == gb((2 + 4) * own)
    data, hop = (2 + 4) * own / 2, 2 * LAYER
    assert one["between_gb"] == gb(data + 2 * 16 * hop * 3 / 4)
    assert two["between_gb"] == gb(data + 2 * 16 * hop * 7 / 4)
    exchanging = 20 * 4 * 2 * 16 * hop * 7 / 8 / 450
    assert one["seconds"] == gb((1 + exchanging) / (16 / 19))
    assert "20 layers a stage, bubble 15.8% with 16 micro-batches; keeps 4 of them, GPipe 16" in one["reason"]


def test_uneven_stages_wait_for_the_fullest():
    run = advice.training(16, model="llama-3.1-405b", iteration_seconds=1.0)
    assert Layout(1, 16, 1).layers(run) == 8
    assert advice.row(run, Layout(1, 16, 1))["state_gb"] == gb(16 * 405.9 * 8 / 126)


def test_slow_links_set_the_pace():
    fast, slow = (
        row(32, Layout(1, 1, 32, "FULL_SHARD"), between_gbit_per_s=rate, gpu_memory=999.0) for rate in (400.0, 40.0)
    )
    assert "other traffic hides behind computing" in fast["reason"]
    assert slow["seconds"] == gb(slow["between_gb"] * 8 / 40)
    assert "the traffic between nodes sets the pace" in slow["reason"]


def test_what_fits_is_ranked_and_the_rest_says_why():
    table = advice.advise(advice.training(32, **SIZES, checkpointing=True))
    fitting = table[table["place"].notna()]
    assert [*fitting["place"]] == [*range(1, len(fitting) + 1)]
    assert fitting["seconds"].map("{:.3g}".format).astype(float).is_monotonic_increasing
    assert (fitting["memory_gb"] <= 80).all()
    assert all(table["reason"])
    rest = table[table["place"].isna()].set_index("cause")
    assert set(rest.index) == {"activations", "gathered", "state", "tp"}
    assert (rest.loc[["state", "gathered", "activations"], "memory_gb"] > 80).all()
    assert rest.at["state", "reason"].iloc[0] == "NO_SHARD over 4: 140 GB of state alone; a GPU has 80 GB"
    assert table.loc[0, ["layout", "strategy"]].tolist() == ["DP 32", "FULL_SHARD"]


@pytest.mark.parametrize(
    ("given", "layout", "reason"),
    [
        ({"gpus": 16}, "TP 16", "TP 16 does not divide a node of 8, and its all-reduces must not leave one"),
        ({"gpus": 8, "hidden": 640, "layers": 14000}, "TP 2 × DP 4", "TP 2 does not divide 5 heads of 128 channels"),
        ({"gpus": 8, "batch": 4}, "DP 8", "DP 8 does not divide a batch of 4"),
        ({"gpus": 128}, "PP 128", "PP 128 is above 80 layers"),
        ({"gpus": 8, "micro_batch": 3}, "PP 8", "micro-batches of 3 do not divide 8 samples of a replica"),
        ({"gpus": 24}, "PP 2 × DP 12", "a stage of 12 GPUs crosses a node of 8"),
    ],
)
def test_what_cannot_be(given, layout, reason):
    table = advice.advise(advice.training(**SIZES | given)).set_index("layout")
    assert table.at[layout, "reason"] == reason


def test_only_data_parallelism_is_sized_for_the_unet():
    table = advice.advise(advice.training(16, model="svd", gpu_memory=96.0)).set_index("layout")
    assert set(table[table["place"].notna()].index) == {"DP 16"}
    assert set(table[table["cause"] == "model"]["reason"]) == {
        "the rules of TP and PP are a transformer's, not a UNet's"
    }


@pytest.mark.parametrize(
    ("parameters", "hidden", "layers"), [(7e9, 4096, 35), (70e9, 9216, 69), (405e9, 16384, 126), (1e8, 1024, 8)]
)
def test_sizes_follow_from_the_parameters(parameters, hidden, layers):
    run = advice.training(8, parameters=parameters)
    assert (run.hidden, run.layers, run.sequence, run.batch) == (hidden, layers, 4096, 8)
    assert 12 * layers * hidden**2 == pytest.approx(parameters, rel=0.03)


def test_the_examples_of_the_article():
    table = article.examples()
    assert [*table.columns] == ["example", "article", "ours", "difference"]
    fits = {row.example: "does not fit" not in row.ours for row in table.itertuples()}
    assert fits == {
        "70B with FSDP: DP 8 FULL_SHARD": False,
        "70B with TP: TP 8": False,
        "70B in 2D: TP 8 × DP 4 FULL_SHARD": False,
        "405B in 3D: TP 8 × PP 16 × DP 8 SHARD_GRAD_OP": False,
        "EC2, 7B: DP 8 FULL_SHARD": True,
        "EC2, 13B: DP 16 FULL_SHARD": True,
        "EC2, 70B: TP 8 × DP 4 FULL_SHARD": True,
        "EC2, 70B: TP 8 × DP 8 FULL_SHARD": True,
        "EC2, 405B: TP 8 × PP 4 × DP 8 SHARD_GRAD_OP": False,
        "EC2, 405B: TP 8 × PP 4 × DP 16 SHARD_GRAD_OP": False,
    }
    assert table["ours"][5].startswith("16 GPUs, 2 nodes;")  # the article prints 128 GPUs
    assert all(table["difference"].str.contains("state .* GB instead of", regex=True))


def printed(line, capsys):
    main(line.split())
    return capsys.readouterr().out


def test_the_command_prints_a_table_within_100_columns(capsys):
    lines = printed("sizing --parameters 70e9 --hidden 8192 --layers 80 --gpus 32 --checkpointing", capsys).splitlines()
    assert max(map(len, lines)) <= 100
    (headings,) = (line for line in lines if line.startswith("  # layout"))
    assert re.match(r"  1 DP 32 +FULL_SHARD +– +35 +7 +6.51 +48.5 +475 +67.8 +5.73$", lines[lines.index(headings) + 1])
    assert sum(line.startswith("excluded: ") for line in lines) >= 4
    assert not any("--checkpointing" in line for line in lines)  # it is on
    without = printed("sizing --parameters 7e9 --gpus 8 --gpu-memory 24", capsys).splitlines()
    assert re.fullmatch(r"with --checkpointing, \d+ more layouts would fit", without[-1])
    examples = printed("sizing --article", capsys).splitlines()
    assert max(map(len, examples)) <= 100
    assert len([line for line in examples if line.startswith("  ours: ")]) == len(article.EXAMPLES)


def test_the_command_prints_json(capsys):
    found = json.loads(printed("sizing --model llama-7b --gpus 16 --json", capsys))
    assert found["training"]["hidden"] == 4096
    assert found["layouts"][0]["place"] == 1
    assert [*json.loads(printed("sizing --article --json", capsys))[0]] == ["example", "article", "ours", "difference"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "--gpus '': must be given"),
        ("--gpus 8", "--parameters '': give these or a model: llama-7b, llama-3-70b, llama-3.1-405b, svd"),
        ("--gpus 8 --model llama-7b --hidden 128 --layers 2", "--hidden 128: with 2 layers is 3.93e+05 parameters"),
        ("--gpus 8 --parameters 7e9 --model svd", "--parameters 7000000000.0: not with --model svd"),
        ("--gpus 12 --parameters 7e9", "--gpus 12: must be a multiple of 8"),
        ("--gpus x --model svd", "--gpus x: must be a whole number from 1 to 1000000"),
        ("--gpus 8 --parameters 7", "--parameters 7.0: must be greater than or equal to 1000"),
        ("--gpus 8 --parameters inf", "--parameters inf: must be a finite number"),
        ("--gpus 8 --parameters 7e9 --gpu-memory 0", "--gpu-memory 0.0: must be greater than or equal to"),
        ("--gpus 8 --parameters 7e9 --precision fp8", "--precision fp8: must be 'mixed' or 'bf16'"),
        ("--gpus 8 --parameters 7e9 --tflops 3 --iteration-seconds 3", "--iteration-seconds 3: not with --tflops"),
        ("--gpus 2 --model gpt", "--model gpt: must be one of llama-7b, llama-3-70b, llama-3.1-405b, svd"),
        ("--gpus 8 --model svd --hidden 3", "--hidden 3: not with svd, whose activations are counted for one size"),
        ("--gpus 8 --article", "--article True: not with --gpus: it has its own"),
    ],
)
def test_bad_input_is_one_line(line, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["sizing", *line.split()])
    assert caught.value.code == 2
    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr.count("\n")) == ("", 1)
    assert said in stderr


def test_too_many_gpus_are_refused():
    with pytest.raises(ConfigError, match="gpus 2000000: must be"):
        advice.training(2_000_000, parameters=7e9)


def test_the_figure_says_what_the_table_says():
    figure = advice.draw(32, **SIZES, checkpointing=True)
    assert figure.get_suptitle() == "70B parameters on 32 GPUs: DP 32, FULL_SHARD comes first"
    words = [text.get_text().replace("\n", " ") for text in figure.axes[3].texts]
    table = advice.advise(advice.training(32, **SIZES, checkpointing=True))
    assert words[0].startswith(f"1. {table['reason'][0]}"[:60])
    assert sum(word.startswith("excluded: ") for word in words) >= 3
    assert "nothing fits" in advice.draw(8, **SIZES).get_suptitle()
