"""What is exported is what ``from_pretrained`` loads: the committed model, or adapters for PEFT."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, T5Config

import gradientmail_core as gm
from gradientmail_core.cli import export as command
from gradientmail_core.errors import ConfigurationError, SchemaMismatch
from gradientmail_core.session.aligning import committed
from gradientmail_hf.export import export
from tests.hf.nodes import config, llama


def run_of(folder: Path, model: torch.nn.Module) -> str:
    """A run whose one node moved every trainable parameter of ``model``; its URL."""
    url = (folder / "run").as_uri()
    with gm.Session(model, mailbox=url, algorithm=gm.DiLoCo(sync_every=2, fragments=2, overlap_steps=0)) as session:
        for _ in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter))
            session.step()
    return url


def described(folder: Path, **changes) -> Path:
    """A folder with a config, and a tokenizer's file beside it."""
    config(architectures=["LlamaForCausalLM"], **changes).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "trainer_state.json").write_text("{}")
    return folder


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(value, copy) for (name, value), (again, copy) in pairs)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_loads_as_the_committed_model(tmp_path, tied, monkeypatch, capsys):
    entry = EntryPoint("hf", "gradientmail_hf.export:export", command.GROUP)
    monkeypatch.setattr(command, "installed_formats", lambda: {"hf": entry})
    model = llama(tie_word_embeddings=tied)
    url = run_of(tmp_path, model)
    folder = described(tmp_path / "config", tie_word_embeddings=tied)
    assert command.main([url, str(tmp_path / "out"), "--hf", str(folder)]) == 0
    assert "at step 4" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(loaded, model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    assert not (tmp_path / "out" / "trainer_state.json").exists()


def test_the_package_brings_the_option():
    """What the project's metadata says, whatever an older installation of it says."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{command.GROUP}"]\nhf = "gradientmail_hf.export:export"' in text


LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "lora": peft.LoraConfig(**LORA),
    "dora and whole layers": peft.LoraConfig(**LORA, use_dora=True, modules_to_save=["lm_head"]),
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_load_on_top_of_their_base(tmp_path, kind):
    settings = ADAPTERS[kind]
    model = peft.get_peft_model(llama(tie_word_embeddings=False), settings)
    found = committed(run_of(tmp_path, model))
    settings.save_pretrained(tmp_path / "config")
    export(found, tmp_path / "out", tmp_path / "config")
    loaded = peft.PeftModel.from_pretrained(llama(tie_word_embeddings=False), tmp_path / "out")
    assert same(loaded, model)


def test_what_is_no_adapter_is_not_exported_as_one(tmp_path):
    whole = committed(run_of(tmp_path, llama()))
    ADAPTERS["lora"].save_pretrained(tmp_path / "config")
    with pytest.raises(SchemaMismatch, match="which is no adapter"):
        export(whole, tmp_path / "again", tmp_path / "config")


def test_what_the_run_does_not_train_comes_from_the_base(tmp_path):
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    folder = described(tmp_path / "config")
    found = committed(run_of(tmp_path, model))
    with pytest.raises(SchemaMismatch, match=r"model.embed_tokens.weight: not in the run"):
        export(found, tmp_path / "out", folder)
    llama().save_pretrained(folder)
    export(found, tmp_path / "out", folder)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


def test_the_architecture_is_found_without_its_name(tmp_path):
    model = llama()
    found = committed(run_of(tmp_path, model))
    config().save_pretrained(tmp_path / "config")
    text = json.loads((tmp_path / "config" / "config.json").read_text())
    text.pop("architectures", None)
    (tmp_path / "config" / "config.json").write_text(json.dumps(text))
    export(found, tmp_path / "out", tmp_path / "config")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (
            LlamaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
            SchemaMismatch,
            "taken",
        ),
        (T5Config(), ConfigurationError, "names no architecture. Give a directory that the model itself was saved to"),
    ],
    ids=["llama", "t5"],
)
def test_a_config_without_an_architecture_is_said_to_be_that(tmp_path, settings, error, told):
    settings.save_pretrained(tmp_path / "config")
    with pytest.raises(error, match=told):
        export(committed(run_of(tmp_path, llama())), tmp_path / "out", tmp_path / "config")


def test_another_model_is_refused_by_name(tmp_path):
    found = committed(run_of(tmp_path, llama()))
    with pytest.raises(
        SchemaMismatch, match=r"gate_proj.weight: \(16, 8\) in the run, \(24, 8\) in the config's model"
    ):
        export(found, tmp_path / "out", described(tmp_path / "config", intermediate_size=24))


def test_folders_that_cannot_be_are_refused(tmp_path):
    found = committed(run_of(tmp_path, llama()))
    with pytest.raises(ConfigurationError, match="There is no directory"):
        export(found, tmp_path / "out", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be exported"):
        export(found, tmp_path / "out", tmp_path / "empty")
