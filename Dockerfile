# not built here: no base image was at hand; its steps were run by hand in a fresh environment
#
# docker build -t train .
# docker run -v "$PWD/logs:/app/logs" -v "$PWD/data:/app/data" train
# docker run --gpus all --shm-size 8g -v "$PWD/logs:/app/logs" -v "$PWD/data:/app/data" train \
#     python scripts/train.py --config configs/cifar10_cnn.yaml
#
# One image for CPU and GPU: torch for Linux brings CUDA, and the machine its driver. The user in it has the number
# 1000, as the first one of most machines; others add --user "$(id -u)", so that logs and data are theirs.
FROM python:3.11-slim
# git: .devcontainer/ needs it; g++: torch.compile
RUN apt-get update && apt-get install -y --no-install-recommends git g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 user && chmod 777 /home/user
ENV HOME=/home/user PATH=/home/user/.local/bin:$PATH
WORKDIR /app
# what is installed stays in its layer until one of these changes
COPY pyproject.toml requirements.txt constraints.txt README.md LICENSE ./
COPY project/__init__.py project/
COPY lightbase/__init__.py lightbase/requirements.txt lightbase/
RUN pip install --no-cache-dir -c constraints.txt -e ".[tools,export,sweep,timm]"
COPY . .
RUN mkdir -p logs data && chown user logs data
USER user
VOLUME ["/app/logs", "/app/data"]
CMD ["python", "scripts/train.py"]
