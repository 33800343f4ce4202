"""DeepSpeed's pipeline API: layers, modules, engines and topologies.

    model = PipelineModule(layers, num_stages=2, loss_fn=loss)
    engine, _, _, _ = initialize_pipeline("ds_config.json", model, training_data=data)
    engine.train_batch()

`threed.initialize` calls `initialize_pipeline` for a `PipelineModule`.
"""

from threed.interop.deepspeed.pipeline_engine import PipelineEngine as PipelineEngine
from threed.interop.deepspeed.pipeline_engine import initialize_pipeline as initialize_pipeline
from threed.interop.deepspeed.pipeline_module import LayerSpec as LayerSpec
from threed.interop.deepspeed.pipeline_module import PipelineModule as PipelineModule
from threed.interop.deepspeed.pipeline_module import TiedLayerSpec as TiedLayerSpec
from threed.interop.deepspeed.process_topology import (
    PipeDataParallelTopology as PipeDataParallelTopology,
)
from threed.interop.deepspeed.process_topology import (
    PipelineParallelGrid as PipelineParallelGrid,
)
from threed.interop.deepspeed.process_topology import (
    PipeModelDataParallelTopology as PipeModelDataParallelTopology,
)
from threed.interop.deepspeed.process_topology import ProcessTopology as ProcessTopology
