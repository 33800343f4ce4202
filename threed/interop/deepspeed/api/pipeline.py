"""DeepSpeed's pipeline API: layers, the module that splits them into stages, and the engine.

model = PipelineModule(layers, num_stages=2, loss_fn=loss)
engine, _, _, _ = threed.initialize(model=model, config="ds_config.json", training_data=data)
engine.train_batch()
"""

from threed.interop.deepspeed.pipeline_engine import PipelineEngine as PipelineEngine
from threed.interop.deepspeed.pipeline_engine import initialize_pipeline as initialize_pipeline
from threed.interop.deepspeed.pipeline_module import LayerSpec as LayerSpec
from threed.interop.deepspeed.pipeline_module import PipelineModule as PipelineModule
from threed.interop.deepspeed.pipeline_module import TiedLayerSpec as TiedLayerSpec
