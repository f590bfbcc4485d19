// Worker of the kernels' measurement: one module, whose exports are called by name.
let kernels;
self.onmessage = async ({ data: { tier, name, args } }) => {
  try {
    if (tier !== undefined) {
      kernels = await import(`/kernels/kernels_${tier}.js`);
      await kernels.default();
      return self.postMessage({ value: null });
    }
    const value = kernels[name](...args);
    self.postMessage({ value: ArrayBuffer.isView(value) ? Array.from(value) : value });
  } catch (error) {
    self.postMessage({ error: String(error?.stack ?? error) });
  }
};
