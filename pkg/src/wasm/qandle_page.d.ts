// The glue of the page module is generated into dist/wasm/; this is the part of it that page.ts uses.
export default function init(options: { module_or_path: URL | string }): Promise<unknown>;
export declare function preferences(): unknown;
export declare function set_preference(key: string, value: unknown): void;
export declare function reset_preferences(): void;
export declare function mark_phase(phase: string): void;
export declare function clear_phase(): void;
export declare function last_phase(): string | null | undefined;
