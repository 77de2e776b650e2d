# One file, a target per service: docker build --target gateway|scheduler|kvmanager|executor .
# The three light services carry no torch. All run as user quire (uid 10001); models are cached in /models.

FROM python:3.12-slim-bookworm AS build
# The compiler stays in this stage. Its version is the base image's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY tools tools
COPY protos protos
COPY kernels kernels
COPY services services
COPY quire quire
# The build's own requirements are pinned in pyproject.toml; it generates the code from protos/ and compiles the kernels.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    XDG_CACHE_HOME=/models \
    HF_HOME=/models/huggingface
RUN useradd --uid 10001 --create-home --home-dir /srv/quire --shell /usr/sbin/nologin quire \
    && install --directory --owner quire --group quire /models
WORKDIR /srv/quire
STOPSIGNAL SIGTERM
ENTRYPOINT ["quire", "serve"]

FROM base AS light
COPY requirements-light.lock /tmp/
RUN pip install --no-cache-dir --requirement /tmp/requirements-light.lock
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl
ENV OMP_NUM_THREADS=1
USER 10001

FROM light AS gateway
EXPOSE 50051 8000 9101
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=6 CMD ["quire", "health", "127.0.0.1:50051"]
CMD ["gateway"]

FROM light AS scheduler
EXPOSE 50052 9102
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=6 CMD ["quire", "health", "127.0.0.1:50052"]
CMD ["scheduler"]

FROM light AS kvmanager
EXPOSE 50053 9103
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=6 CMD ["quire", "health", "127.0.0.1:50053"]
CMD ["kvmanager"]

FROM base AS executor
COPY requirements-executor.lock /tmp/
RUN pip install --no-cache-dir --requirement /tmp/requirements-executor.lock
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl
USER 10001
VOLUME /models
EXPOSE 50054 9104
# Reading and downloading a model takes its time before the first SERVING.
HEALTHCHECK --interval=5s --timeout=3s --start-period=600s --retries=6 CMD ["quire", "health", "127.0.0.1:50054"]
CMD ["executor"]
