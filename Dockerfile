# Two images of one project, on one base:
#   docker build --target study -t gradnorm-study .      a cluster's node and its driver: torch and Ray
#   docker build --target service -t gradnorm-service .  the HTTP service: neither of them
#
# TORCH_INDEX is where torch comes from beside PyPI: its CPU builds by default. Empty takes PyPI's own,
# which holds CUDA's libraries (several GB): see docker-compose.gpu.yml.
# Dependencies come first and from constraints.txt alone, so that a change of code rebuilds in seconds.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 \
    PATH=/opt/venv/bin:$PATH \
    HOME=/home/gradnorm
# The mount points belong to the user: a new named volume takes over the owner of what it covers.
RUN useradd --system --uid 10001 --no-log-init --home-dir /home/gradnorm --create-home gradnorm \
    && install -d -o gradnorm -g gradnorm -m 0755 /runs \
    && install -d -o gradnorm -g gradnorm -m 0700 /secret
WORKDIR /app

# What pyproject.toml asks for, without the project itself: one list an image.
FROM base AS lists
COPY pyproject.toml .
RUN python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
[open(f'/tmp/{name}.txt', 'w').write('\n'.join(project['dependencies'] + project['optional-dependencies'][name])) \
for name in ('study', 'service')]"

FROM base AS study-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt .
COPY --from=lists /tmp/study.txt .
# ray[default] adds what a cluster of several needs: runtime environments, jobs, the dashboard.
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -c constraints.txt -r study.txt 'ray[default]'

FROM base AS service-packages
RUN apt-get update && apt-get install -y --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
COPY constraints.txt .
COPY --from=lists /tmp/service.txt .
RUN python3 -m venv --without-pip /opt/venv \
    && /usr/local/bin/python3 -m pip --python /opt/venv/bin/python install --no-cache-dir --no-compile -c constraints.txt -r service.txt
# A third of this is never opened by a service: tests and headers, debug symbols, Arrow's RPC, plotly's Python
# (its JavaScript is what pages load), scipy's subpackages that its statistics don't import.
# Libraries in *.libs were rewritten by their wheels and don't survive strip.
RUN cd /opt/venv/lib/python3*/site-packages \
    && find . -type d -name tests -prune -exec rm -r {} + \
    && find . \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.a' -o -name '*.h' -o -name '*.c' \) -delete \
    && find . -name '*.so*' -type f ! -path '*.libs/*' -exec strip --strip-unneeded {} + \
    && rm -r pyarrow/include pyarrow/includes pyarrow/*flight* \
    && rm pyarrow/libarrow_python*.so pyarrow/libarrow_python*.so.*.*.* \
    && find plotly -type f ! -name plotly.min.js ! -path plotly/__init__.py -delete \
    && rm -r narwhals* \
    && cd scipy && rm -r cluster datasets differentiate fftpack io misc odr signal

FROM base AS study
COPY --from=study-packages /opt/venv /opt/venv
COPY docker/driver /usr/local/bin/driver
COPY models models
COPY study study
RUN python -m compileall -q models study
ARG GIT_COMMIT=""
LABEL org.opencontainers.image.title="gradnorm-study" \
      org.opencontainers.image.description="Runs studies of training stability on a Ray cluster" \
      org.opencontainers.image.revision="${GIT_COMMIT}"
ENV PYTHONPATH=/app \
    RAY_USAGE_STATS_ENABLED=0 \
    GRADNORM_STORAGE=/runs
USER gradnorm
# A driver and a node have nothing in common to ask; docker-compose.yml knows which is which.
HEALTHCHECK NONE
CMD ["python", "study/run.py"]

FROM base AS service
COPY --from=service-packages /opt/venv /opt/venv
COPY study study
COPY service service
# Importing it once shows that nothing which it needs was left out above.
RUN PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/mpl python -c "import service.app, service.plots, study.reading" \
    && rm -r /tmp/mpl
ARG GIT_COMMIT=""
LABEL org.opencontainers.image.title="gradnorm-service" \
      org.opencontainers.image.description="Serves runs, traces and pictures of gradient norms over HTTP" \
      org.opencontainers.image.revision="${GIT_COMMIT}"
# The image holds no compiled Python: it would weigh 40 MB. A start compiles what it imports.
ENV PYTHONPYCACHEPREFIX=/tmp/pycache \
    MPLCONFIGDIR=/tmp/mpl \
    GRADNORM_STORAGE=/runs
USER gradnorm
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
CMD ["uvicorn", "--factory", "service.app:create_app", "--host", "0.0.0.0", "--port", "8000"]
