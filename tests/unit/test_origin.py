"""What samples were made from is recorded with them, and a run that is resumed is made from the same or refused."""

import shutil

import pytest
import torch
from PIL import Image

from launch import resuming
from tests import experts, families
from vdpp_core import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.fields import MODELS
from vdpp_core.config.layout import Parallel
from vdpp_core.engine import worker
from vdpp_core.runs import files, origin, results, runfolder, saved_latents
from vdpp_core.runs.run import Run

DUMMY = {"model": "dummy", "total_steps": 4, "num_samples": 3, "latent_shape": (1, 4, 2, 8, 8), "threads": 1}


def of(config):
    return origin.of(config, resolve(config))


def edit(folder, **changes):
    config = RunConfig.read(folder).replace(**changes)
    files.write_atomically(folder / "config.json", config.to_json())


def everything_in(folder):
    return {path: (path.read_bytes(), path.stat().st_ino) for path in folder.rglob("*") if path.is_file()}


def assert_refused(folder, words):
    before = everything_in(folder)
    with pytest.raises(ConfigError, match=words) as refused:
        resuming.begin(Run(folder))
    assert str(refused.value).startswith(f"run {folder.name}: ")
    assert "\n" not in str(refused.value)
    assert everything_in(folder) == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a good run of three samples."""
    place = tmp_path_factory.mktemp("whole") / "run"
    return worker.run(RunConfig(save_latents=True, device="cpu", output_dir=place, **DUMMY))


@pytest.fixture
def stopped(whole, tmp_path):
    """The same, as if it had been stopped after two samples."""
    folder = shutil.copytree(whole, tmp_path / "run")
    Run(folder).latents_path(2).unlink()
    (folder / "result.json").unlink()
    results.write(Run(folder), "stopped")
    return folder


def go_on(folder):
    """What `launch resume` has a rank do."""
    worker.execute(Run(folder), worker.Ranks(0, 1, 0, 1, under_torchrun=False), monitored=False)


def test_a_resumed_run_keeps_what_was_made_from_the_same(stopped, whole):
    assert resuming.begin(Run(stopped)) == []
    work = Run(stopped).work
    assert (list(work.kept), list(work.latents)) == ([0, 1], [2])
    go_on(stopped)
    for sample in range(3):
        assert Run(stopped).latents_path(sample).read_bytes() == Run(whole).latents_path(sample).read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"total_steps": 3},
            "total_steps was 4 when its samples were made and is 3 in config.json now: restore it",
        ),
        ({"seed": 5}, "seed was 0 when"),
        ({"guidance_scale": 2.5}, r"guidance_scale was 3\.0 when .* and is 2\.5 in"),
        ({"fps": 9}, "fps was 7"),
        ({"latent_shape": (1, 4, 3, 8, 8)}, r"shape was \[1, 4, 2, 8, 8\] when"),
        ({"parallel": Parallel(cfg=2)}, "cfg was 1"),
        ({"model": "tiny", "random_weights": True}, "random_weights was False"),
        ({"guidance_mode": "sequential"}, "guidance_mode was batched"),
        ({"dtype": "bf16"}, "was computed on cpu in float32; here, cpu in bfloat16 gives other latents"),
    ],
)
def test_an_edited_configuration_is_refused(changes, words, stopped):
    edit(stopped, **changes)
    assert_refused(stopped, words)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": 7},
        {"timeout_s": 4.0},
        {"warmup_samples": 1},
        {"parallel": Parallel(dp=2)},
        {"parallel": Parallel(pp=2)},
        {"latent_shape": None, "num_frames": 2, "height": 64, "width": 64},  # the same, in pixels
        {"threads": 2},  # the earlier number is taken
    ],
)
def test_what_changes_no_bit_may_change(changes, stopped):
    if "latent_shape" in changes:
        kept = RunConfig.read(stopped).model_dump(mode="json", exclude={"latent_shape"}, exclude_none=True)
        config = RunConfig(**kept | {name: value for name, value in changes.items() if value is not None})
        files.write_atomically(stopped / "config.json", config.to_json())
    else:
        edit(stopped, **changes)
    assert resuming.begin(Run(stopped)) == []
    config = RunConfig.read(stopped)
    work = Run(stopped).work
    assert (list(work.kept), work.latents[0], config.threads) == ([0, 1], 2, 1)


def test_every_field_counts_unless_it_is_known_not_to():
    """A field that is added to RunConfig later counts by itself; lists name no field that does not exist."""
    lists = (origin.WITHOUT_EFFECT, origin.OF_VIDEOS, origin.BY_OUTCOME)
    named = set().union(*lists)
    assert len(named) == sum(map(len, lists))
    assert named < set(RunConfig.model_fields)
    settings = of(RunConfig(**DUMMY).for_ranks(1)).samples.settings
    assert set(RunConfig.model_fields) - named <= set(settings)


def test_a_setting_that_a_record_does_not_know_had_its_default(stopped):
    """As in a folder of an older version; the digest in its samples stays what it was."""
    record = origin.read(stopped)
    settings = {name: value for name, value in record.samples.settings.items() if name != "shortcuts"}
    older = record.model_copy(update={"samples": record.samples.model_copy(update={"settings": settings})})
    origin.write(stopped, older)
    for sample in range(2):
        Run(stopped).save_latents(sample, Run(stopped).load_latents(sample), older.digest)
    assert origin.read(stopped).digest == older.digest != record.digest
    assert resuming.begin(Run(stopped)) == []
    assert list(Run(stopped).work.kept) == [0, 1]


@pytest.fixture
def of_an_image(tmp_path):
    """A folder as of a stopped run that animates an image with a model in a folder, and the two of them."""
    image, model = tmp_path / "photo.png", tmp_path / "model"
    Image.new("RGB", (16, 16), "red").save(image)
    shutil.copytree(MODELS["tiny"], model)
    config = RunConfig(command="generate", image=image, model_id=str(model), num_samples=2, output_dir=tmp_path / "run")
    config = config.for_ranks(1)
    folder = runfolder.create(config)
    record = origin.begin(folder, config, resolve(config))
    Run(folder).save_latents(0, torch.zeros(config.shape), record.digest)
    results.settle(Run(folder), reason="stopped")
    return folder, image, model


def test_another_image_in_its_place_is_refused(of_an_image, tmp_path):
    folder, image, _ = of_an_image
    content = image.read_bytes()
    Image.new("RGB", (16, 16), "blue").save(image)
    assert_refused(folder, r"image .*photo\.png is not the file that its samples were made from: restore it")
    (tmp_path / "elsewhere.png").write_bytes(content)
    edit(folder, image=tmp_path / "elsewhere.png")
    assert resuming.begin(Run(folder)) == []  # it is the content that counts


def test_an_image_that_is_gone_is_refused(of_an_image):
    folder, image, _ = of_an_image
    image.unlink()
    with pytest.raises(ConfigError, match=r"photo\.png: must be readable: samples are made from it \(No such file"):
        resuming.begin(Run(folder))
    assert not (folder / "attempts").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("unet/diffusion_pytorch_model.safetensors", b"other", "has changed since its samples were made"),
        ("image_encoder/model.safetensors", b"other", "has changed since"),
        ("scheduler/scheduler_config.json", b"{}", "has changed since"),
        ("vae/diffusion_pytorch_model.safetensors", None, "has disappeared since"),
        ("unet/more.safetensors", b"more", "has been added since"),
    ],
)
def test_another_file_of_the_model_is_refused(name, content, words, of_an_image):
    folder, _, model = of_an_image
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    assert_refused(folder, f"{name} of the model {words}")


@pytest.mark.parametrize("name", ["unet/notes.txt", "unet/diffusion_pytorch_model.fp16.safetensors"])
def test_a_file_that_a_run_does_not_read_does_not_count(name, of_an_image):
    folder, _, model = of_an_image
    (model / name).write_bytes(b"something")
    assert resuming.begin(Run(folder)) == []


def test_a_model_may_move_but_is_not_replaced_by_another(of_an_image, tmp_path, several_files):
    folder, _, model = of_an_image
    edit(folder, model_id=str(model.rename(tmp_path / "elsewhere")))
    assert origin.read(folder).samples.source == str(model)
    origin.check(origin.read(folder), of(RunConfig.read(folder)), "run")
    edit(folder, model_id=several_files)
    assert_refused(folder, "model was .*/model when its samples were made and is .*/several-files now: restore")


def test_a_hub_model_counts_by_its_revision(monkeypatch):
    def cached(revision):
        place = f"/cache/models--somebody--some-svd/snapshots/{revision}"
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda _, name: f"{place}/{name}")

    cached("aaaa")
    config = RunConfig(model_id="somebody/some-svd").for_ranks(1)
    before = of(config)
    cached("bbbb")
    now = of(config)
    assert before.samples.model == {"revision": "aaaa"}
    with pytest.raises(ConfigError, match="run one: model somebody/some-svd was at revision aaaa and is at bbbb now"):
        origin.check(before, now, "one")


def test_samples_without_a_record_are_computed_again(stopped):
    """As in a folder of an older version: nobody knows what they were made from."""
    (stopped / origin.FILE).unlink()
    old = Run(stopped).latents_path(0).read_bytes()
    edit(stopped, total_steps=3)
    [line] = resuming.begin(Run(stopped))
    assert line == "run has no record of what its samples were made from; all are computed again"
    work = Run(stopped).work
    assert (list(work.kept), list(work.latents)) == ([], [0, 1, 2])
    assert not Run(stopped).latents_path(0).exists()  # another resume must not take it for one of the new ones
    assert (stopped / "attempts" / "1" / "latents" / "sample-000.safetensors").read_bytes() == old
    go_on(stopped)
    assert {saved_latents.origin_of(Run(stopped).latents_path(sample)) for sample in range(3)} == {
        origin.read(stopped).digest
    }


def test_a_finished_run_without_a_record_is_finished(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / origin.FILE).unlink()
    with pytest.raises(ConfigError, match="has all its samples"):
        resuming.begin(Run(folder))
    assert resuming.intact(Run(folder)) == ([0, 1, 2], [])


def test_a_sample_of_another_run_is_not_kept(stopped):
    latents = Run(stopped).load_latents(1)
    Run(stopped).save_latents(1, latents, "0" * 64)
    [line] = resuming.begin(Run(stopped))
    assert line.startswith(str(Run(stopped).latents_path(1)))
    assert line.endswith("computed again")
    assert list(Run(stopped).work.latents) == [1, 2]


def test_a_damaged_record_is_none(stopped):
    (stopped / origin.FILE).write_text('{"samples": {"settings": []}}')
    assert len(resuming.begin(Run(stopped))) == 1
    assert list(Run(stopped).work.kept) == []


def test_videos_that_would_be_decoded_otherwise_are_made_again(of_an_image):
    """Latents are kept: fewer frames at a time is what somebody takes whose memory did not suffice."""
    folder, _, _ = of_an_image
    for ending in (".mp4", ".gif", ".png"):
        path = folder / "videos" / f"sample-000{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(resuming._ENDS[ending] or b"video")
    edit(folder, decode_chunk_size=1)
    [line] = resuming.begin(Run(folder))
    assert line == "decode_chunk_size was 4 and is 1 in config.json now; videos are made again"
    work = Run(folder).work
    assert (list(work.kept), list(work.videos)) == ([0], [0])
    assert list((folder / "videos").iterdir()) == []  # an attempt that ends early leaves no mixture
    assert len(list((folder / "attempts" / "1" / "videos").iterdir())) == 3
    assert origin.read(folder).videos == {"decode_chunk_size": 1}
    assert list(Run(folder).work.latents) == [1]


def test_another_version_of_a_library_is_named(stopped):
    record = origin.read(stopped)
    origin.write(stopped, record.model_copy(update={"versions": record.versions | {"torch": "1.0"}}))
    [line] = resuming.begin(Run(stopped))
    assert line.startswith("torch was 1.0 when the first samples were made and is ")
    assert list(Run(stopped).work.kept) == [0, 1]


def test_a_rank_that_would_compute_other_samples_ends_before_the_first(stopped):
    """What was changed between the check and the start."""
    resuming.begin(Run(stopped))
    edit(stopped, seed=1)
    kept = {sample: Run(stopped).latents_path(sample).read_bytes() for sample in range(2)}
    with pytest.raises(ConfigError, match="seed was 0"):
        go_on(stopped)
    assert not Run(stopped).latents_path(2).exists()
    assert kept == {sample: Run(stopped).latents_path(sample).read_bytes() for sample in kept}


def test_another_machine_has_the_same_files_or_takes_no_part(of_an_image, tmp_path):
    folder, image, _ = of_an_image
    record, config = origin.read(folder), RunConfig.read(folder)
    own = runfolder.create(config.replace(output_dir=tmp_path / "of-the-other"))
    origin.begin(own, config, resolve(config.replace(threads=2)), record)  # with another number of cores, perhaps
    assert origin.read(own) == record
    Image.new("RGB", (16, 16), "blue").save(image)
    with pytest.raises(ConfigError, match=r"photo\.png is not the file that its samples"):
        origin.begin(own, config, resolve(config), record)


def test_nothing_is_recorded_where_no_latents_are_kept(tmp_path):
    folder = worker.run(RunConfig(device="cpu", output_dir=tmp_path / "run", **DUMMY))
    assert not (folder / origin.FILE).exists()


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "transformer_2/config.json",
        "transformer_2/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "vae/diffusion_pytorch_model.safetensors",
    ],
)
def test_every_part_of_another_pipeline_counts(name, tmp_path):
    model = shutil.copytree(families.folder("wan-2.2"), tmp_path / "model")
    config = RunConfig(model_id=str(model), prompt="a", total_steps=2, latent_shape=(1, 16, 3, 4, 6)).for_ranks(1)
    before = of(config)
    (model / name).write_bytes((model / name).read_bytes() + b" ")
    with pytest.raises(ConfigError, match=f"run one: {name} of the model has changed since its samples were made"):
        origin.check(before, of(config), "one")


@pytest.mark.parametrize("name", ["config.json", "low/config.json", "high/diffusion_pytorch_model.safetensors"])
def test_all_experts_count(name, tmp_path):
    model = shutil.copytree(experts.folder(), tmp_path / "model")
    config = RunConfig(model_id=str(model), num_frames=2, height=64, width=64, total_steps=6).for_ranks(1)
    before = of(config)
    (model / "unet" / name).write_bytes((model / "unet" / name).read_bytes() + b" ")
    with pytest.raises(ConfigError, match=f"run one: unet/{name} of the model has changed since its samples were made"):
        origin.check(before, of(config), "one")


def test_how_the_experts_of_a_run_are_shared_changes_no_bit():
    layouts = [Parallel(pp=2), Parallel(stage_ranks=(1, 3)), Parallel()]
    known = {"model_id": str(experts.folder()), "num_frames": 2, "height": 64, "width": 64, "total_steps": 6}
    serve = {"experts": (("unet/high", 4), ("unet/low", 2))}
    more = [serve | {"split": "even"}, serve, {"swap": "disk", "swap_batch": 2, "swap_gb_per_s": 1.0}]
    runs = [RunConfig(**known, **each, parallel=layout) for each, layout in zip(more, layouts, strict=True)]
    assert len({of(run).digest for run in runs}) == 1
