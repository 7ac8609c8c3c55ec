"""Flags of `export`, and which of them go together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ArtifactOptions:
    """Flags of `export`; a field has the name of its flag."""

    batch: int | None = None
    orientation: str = "landscape"
    picture_size: tuple[int, int] | None = None
    deepstream: bool = False
    opset: int | None = None
    static: bool = False
    float16: bool = False
    int8: bool = False
    calibration: str | None = None
    calibrator: str = "minmax"
    int8_for: str | None = None
    int8_budget: float | None = None

    def check(self, format: str) -> None:
        """Raise ValueError for a flag that does not apply to the format or to the other flags."""
        is_model, is_onnx = format in ("stablehlo", "onnx"), format == "onnx"
        conditions = {
            "--batch": (self.batch is not None, is_model),
            "--int8": (self.int8, is_model),
            "--opset": (self.opset is not None, is_onnx),
            "--static": (self.static, is_onnx),
            "--float16": (self.float16, is_onnx or format == "safetensors"),
            "--picture_size": (self.picture_size is not None, is_onnx),
            "--deepstream": (self.deepstream, is_onnx),
            "--calibrator=entropy": (self.calibrator == "entropy", is_onnx),
            "--int8_for": (self.int8_for is not None, is_onnx),
        }
        for flag, (given, applies) in conditions.items():
            if given and not applies:
                raise ValueError(f"{flag} does not apply to --format={format}")
        if self.float16 and self.int8:
            raise ValueError("--float16 and --int8 are different models: export them one by one")
        if self.calibration is not None and not self.int8:
            raise ValueError("--calibration needs --int8")
        for flag in ("int8_for", "int8_budget"):
            if getattr(self, flag) is not None and not self.int8:
                raise ValueError(f"--{flag} needs --int8")
        if self.int8_budget is not None and not 0 <= self.int8_budget <= 1:
            raise ValueError(f"--int8_budget is {self.int8_budget}, expected an AP of 0 to 1")
        if self.int8 and self.calibration is None:
            raise ValueError("--int8 needs --calibration, a folder of representative images")
        if self.deepstream and self.picture_size is None:
            raise ValueError(
                "--deepstream needs --picture_size, the HEIGHT,WIDTH of the frames: nvinfer "
                "supports a single input"
            )
        if self.deepstream and self.static and self.batch not in (None, 1):
            raise ValueError(
                f"--batch is {self.batch}, expected 1 for --static --deepstream: nvinfer runs a "
                "batch with as many images as there are frames"
            )
        if self.deepstream and self.int8_for == "cpu":
            raise ValueError("--deepstream runs in TensorRT: leave out --int8_for=cpu")

    @property
    def int8_runtime(self) -> str:
        """What runs the int8 model, one of `quantize.RUNTIMES`."""
        return self.int8_for or ("tensorrt" if self.deepstream else "cpu")
