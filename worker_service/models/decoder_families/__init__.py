"""Families of decoders: settings from `config.json`, by the class name in it."""

from collections.abc import Callable, Mapping

from worker_service.models.decoder.specs import DecoderSettings
from worker_service.models.decoder_families.alibi import bloom_settings, mpt_settings
from worker_service.models.decoder_families.axk2 import axk2_settings
from worker_service.models.decoder_families.bailing import (
    bailing_moe_settings,
    glm4_moe_or_sarvam_settings,
)
from worker_service.models.decoder_families.bailing_hybrid import bailing_hybrid_settings
from worker_service.models.decoder_families.common import Config
from worker_service.models.decoder_families.delta_nets import (
    olmo_hybrid_settings,
    qwen3_5_moe_settings,
    qwen3_5_settings,
    qwen3_next_settings,
)
from worker_service.models.decoder_families.dots3_note import dots3_note_settings
from worker_service.models.decoder_families.gemma import (
    gemma2_settings,
    gemma3_settings,
    gemma_settings,
)
from worker_service.models.decoder_families.gemma3n import gemma3n_settings
from worker_service.models.decoder_families.gemma4 import gemma4_settings, gemma4_unified_settings
from worker_service.models.decoder_families.glm5_next import glm5_next_settings
from worker_service.models.decoder_families.gpt import gpt2_settings, gpt_neo_settings, opt_settings
from worker_service.models.decoder_families.gpt_oss import gpt_oss_settings
from worker_service.models.decoder_families.granite import (
    granite_moe_settings,
    granite_moe_shared_settings,
    granite_moe_swa_settings,
    granite_settings,
    granite_swa_settings,
    hyperclovax_settings,
)
from worker_service.models.decoder_families.hunyuan import (
    hunyuan_dense_settings,
    hunyuan_moe_settings,
)
from worker_service.models.decoder_families.hy_v4 import hy_v4_settings
from worker_service.models.decoder_families.hybrids import (
    bamba_settings,
    falcon_h1_settings,
    granite_hybrid_settings,
    jamba_settings,
    nemotron_h_settings,
)
from worker_service.models.decoder_families.kimi_linear import kimi_linear_settings
from worker_service.models.decoder_families.laguna import laguna_settings
from worker_service.models.decoder_families.lara import lara_mini_settings
from worker_service.models.decoder_families.latent import (
    deepseek_v2_settings,
    deepseek_v3_settings,
    glm4_moe_lite_settings,
    youtu_settings,
)
from worker_service.models.decoder_families.latent_kin import (
    axk1_settings,
    deepseek_v32_settings,
    glm_moe_dsa_settings,
    minicpm3_settings,
    mistral4_settings,
)
from worker_service.models.decoder_families.lfm2 import (
    lfm2_moe_settings,
    lfm2_settings,
    lfm3_settings,
)
from worker_service.models.decoder_families.llama import (
    cwm_settings,
    exaone_settings,
    helium_settings,
    internlm3_settings,
    iquest_coder_settings,
    llama_settings,
    ministral_settings,
)
from worker_service.models.decoder_families.llama4 import llama4_settings
from worker_service.models.decoder_families.llama_kin import (
    apertus_settings,
    arcee_settings,
    ernie4_5_settings,
    exaone4_settings,
    glm4_settings,
    ministral3_settings,
    nanochat_settings,
    olmo2_settings,
    olmo_settings,
    phi3_settings,
    seed_oss_settings,
    smollm3_settings,
)
from worker_service.models.decoder_families.longcat import longcat_flash_settings
from worker_service.models.decoder_families.mamba import mamba2_settings, mamba_settings
from worker_service.models.decoder_families.mimo import mimo_v2_flash_settings
from worker_service.models.decoder_families.minimax_m3 import minimax_m3_settings
from worker_service.models.decoder_families.mixture_kin import (
    ernie4_5_moe_settings,
    flint_settings,
    minimax_m2_settings,
    olmoe_settings,
    phimoe_settings,
)
from worker_service.models.decoder_families.mixtures import (
    mellum_settings,
    mixtral_settings,
    qwen_moe_settings,
)
from worker_service.models.decoder_families.muse import muse_glimmer_settings
from worker_service.models.decoder_families.parallel import (
    cohere2_moe_settings,
    cohere_settings,
    falcon_settings,
    gpt_neox_settings,
    gptj_settings,
    jais2_settings,
    nemotron_settings,
    phi_settings,
    stablelm_settings,
    starcoder2_settings,
)
from worker_service.models.decoder_families.recurrent_gemma import recurrent_gemma_settings
from worker_service.models.decoder_families.scored_kin import (
    afmoe_settings,
    exaone_moe_settings,
    hy_v3_settings,
    kolibri1_settings,
    solar_open_settings,
)
from worker_service.models.decoder_families.scored_mixtures import dots1_settings
from worker_service.models.decoder_families.step import step3p5_settings
from worker_service.models.decoder_families.zamba import zamba2_settings

DECODERS: Mapping[str, Callable[[Config], DecoderSettings]] = {
    "LlamaForCausalLM": llama_settings,
    "ExaoneForCausalLM": exaone_settings,
    "InternLM3ForCausalLM": internlm3_settings,
    "IQuestCoderForCausalLM": iquest_coder_settings,
    "HeliumForCausalLM": helium_settings,
    "CwmForCausalLM": cwm_settings,
    "MinistralForCausalLM": ministral_settings,
    "MistralForCausalLM": llama_settings,
    "Qwen2ForCausalLM": llama_settings,
    "Qwen3ForCausalLM": llama_settings,
    "GemmaForCausalLM": gemma_settings,
    "Gemma2ForCausalLM": gemma2_settings,
    "Gemma3ForCausalLM": gemma3_settings,
    "Gemma3nForCausalLM": gemma3n_settings,
    "Gemma4ForCausalLM": gemma4_settings,
    "Gemma4UnifiedForCausalLM": gemma4_unified_settings,
    "MixtralForCausalLM": mixtral_settings,
    "Qwen2MoeForCausalLM": qwen_moe_settings,
    "Qwen3MoeForCausalLM": qwen_moe_settings,
    "Glm4MoeForCausalLM": glm4_moe_or_sarvam_settings,
    "BailingMoeV2ForCausalLM": bailing_moe_settings,
    "SarvamMoEForCausalLM": bailing_moe_settings,
    "Dots1ForCausalLM": dots1_settings,
    "SolarOpenForCausalLM": solar_open_settings,
    "ExaoneMoeForCausalLM": exaone_moe_settings,
    "HYV3ForCausalLM": hy_v3_settings,
    "HYV4ForCausalLM": hy_v4_settings,
    "AfmoeForCausalLM": afmoe_settings,
    "Kolibri1ForCausalLM": kolibri1_settings,
    "Step3p5ForCausalLM": step3p5_settings,
    "LagunaForCausalLM": laguna_settings,
    "Glm5NextForCausalLM": glm5_next_settings,
    "MuseGlimmerForCausalLM": muse_glimmer_settings,
    "MellumForCausalLM": mellum_settings,
    "DeepseekV2ForCausalLM": deepseek_v2_settings,
    "DeepseekV3ForCausalLM": deepseek_v3_settings,
    "DeepseekV32ForCausalLM": deepseek_v32_settings,
    "AXK1ForCausalLM": axk1_settings,
    "AXK2ForCausalLM": axk2_settings,
    "Dots3NoteForCausalLM": dots3_note_settings,
    "GlmMoeDsaForCausalLM": glm_moe_dsa_settings,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite_settings,
    "YoutuForCausalLM": youtu_settings,
    "MiniCPM3ForCausalLM": minicpm3_settings,
    "Mistral4ForCausalLM": mistral4_settings,
    "LongcatFlashForCausalLM": longcat_flash_settings,
    "OlmoeForCausalLM": olmoe_settings,
    "GraniteMoeForCausalLM": granite_moe_settings,
    "GraniteMoeSharedForCausalLM": granite_moe_shared_settings,
    "GraniteMoeSWAForCausalLM": granite_moe_swa_settings,
    "MiniMaxM2ForCausalLM": minimax_m2_settings,
    "MiniMaxM3VLForCausalLM": minimax_m3_settings,
    "Ernie4_5ForCausalLM": ernie4_5_settings,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe_settings,
    "GptOssForCausalLM": gpt_oss_settings,
    "Llama4ForCausalLM": llama4_settings,
    "FlintForCausalLM": flint_settings,
    "MiMoV2FlashForCausalLM": mimo_v2_flash_settings,
    "PhimoeForCausalLM": phimoe_settings,
    "HunYuanDenseV1ForCausalLM": hunyuan_dense_settings,
    "HunYuanMoEV1ForCausalLM": hunyuan_moe_settings,
    "ApertusForCausalLM": apertus_settings,
    "Apertus1p5TextForCausalLM": apertus_settings,
    "ArceeForCausalLM": arcee_settings,
    "BloomForCausalLM": bloom_settings,
    "CohereForCausalLM": cohere_settings,
    "Cohere2ForCausalLM": cohere_settings,
    "Cohere2MoeForCausalLM": cohere2_moe_settings,
    "FalconForCausalLM": falcon_settings,
    "GPTJForCausalLM": gptj_settings,
    "GPTNeoXForCausalLM": gpt_neox_settings,
    "Ministral3ForCausalLM": ministral3_settings,
    "MptForCausalLM": mpt_settings,
    "Jais2ForCausalLM": jais2_settings,
    "NanoChatForCausalLM": nanochat_settings,
    "NemotronForCausalLM": nemotron_settings,
    "PhiForCausalLM": phi_settings,
    "StableLmForCausalLM": stablelm_settings,
    "Starcoder2ForCausalLM": starcoder2_settings,
    "Exaone4ForCausalLM": exaone4_settings,
    "GlmForCausalLM": glm4_settings,
    "Glm4ForCausalLM": glm4_settings,
    "GraniteForCausalLM": granite_settings,
    "GraniteSWAForCausalLM": granite_swa_settings,
    "HyperCLOVAXForCausalLM": hyperclovax_settings,
    "OlmoForCausalLM": olmo_settings,
    "Olmo2ForCausalLM": olmo2_settings,
    "Olmo3ForCausalLM": olmo2_settings,
    "Phi3ForCausalLM": phi3_settings,
    "SeedOssForCausalLM": seed_oss_settings,
    "SmolLM3ForCausalLM": smollm3_settings,
    "Lfm2ForCausalLM": lfm2_settings,
    "Lfm2MoeForCausalLM": lfm2_moe_settings,
    "Lfm3ForCausalLM": lfm3_settings,
    "RecurrentGemmaForCausalLM": recurrent_gemma_settings,
    "MambaForCausalLM": mamba_settings,
    "FalconMambaForCausalLM": mamba_settings,
    "Mamba2ForCausalLM": mamba2_settings,
    "BambaForCausalLM": bamba_settings,
    "FalconH1ForCausalLM": falcon_h1_settings,
    "GraniteMoeHybridForCausalLM": granite_hybrid_settings,
    "JambaForCausalLM": jamba_settings,
    "NemotronHForCausalLM": nemotron_h_settings,
    "Zamba2ForCausalLM": zamba2_settings,
    "KimiLinearForCausalLM": kimi_linear_settings,
    "BailingHybridForCausalLM": bailing_hybrid_settings,
    "LaraMiniForCausalLM": lara_mini_settings,
    "OlmoHybridForCausalLM": olmo_hybrid_settings,
    "Qwen3NextForCausalLM": qwen3_next_settings,
    "Qwen3_5ForCausalLM": qwen3_5_settings,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe_settings,
    "OPTForCausalLM": opt_settings,
    "GPT2LMHeadModel": gpt2_settings,
    "GPTBigCodeForCausalLM": gpt2_settings,
    "GPTNeoForCausalLM": gpt_neo_settings,
}
"""By the class name: reads settings from a configuration, in which absent keys have the defaults of
`transformers`. Raises `common.NotNative` for a variant that the layers do not compute."""
