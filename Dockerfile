# Trains on the CPU: docker build -t ppo_ext .    With RL Zoo: docker build --build-arg EXTRAS=zoo -t ppo_ext-zoo .
FROM python:3.12 AS build
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
ARG EXTRAS=tensorboard
# Wheels of PyTorch for the CPU are 6 GB smaller.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu OMP_NUM_THREADS=1
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[$EXTRAS]" "gymnasium[classic-control]"
WORKDIR /work
