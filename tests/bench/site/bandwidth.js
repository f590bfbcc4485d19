// Worker of the bandwidth measurement: reads its part of a shared memory when told to.
let read;
self.onmessage = async ({ data }) => {
  if (data.module !== undefined) {
    const instance = await WebAssembly.instantiate(data.module, { env: { memory: data.memory } });
    read = instance.exports.read;
    read(data.from, data.to);
    return self.postMessage("ready");
  }
  const began = performance.now();
  for (let i = 0; i < data.passes; i++) read(data.from, data.to);
  self.postMessage(performance.now() - began);
};
